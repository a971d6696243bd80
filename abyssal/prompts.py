"""What may be asked of an `LLM`, made uniform: prompts in their several forms, parameters for each, options of chats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .core.errors import InvalidRequest
from .core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from .structured.spec import StructuredOutput
    from .text.chat import ChatParser

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams | None] | None

DEFAULT_MAX_TOKENS = 8192
"""Generated tokens where `max_tokens` is None; a chat that thinks gets 65,536, at full effort 131,072. The model's length
bounds all of them."""


@dataclass(frozen=True)
class Job:
    """A request to be, made just before it is queued."""

    prompt: str | Sequence[int]
    params: SamplingParams
    parsers: tuple[ChatParser, ...] = ()
    structured: StructuredOutput | None = None


@dataclass(frozen=True)
class ChatOptions:
    """How conversations are rendered and what their answers have to satisfy; see `LLM.chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    response_format: Mapping[str, Any] | None
    structured: StructuredOutput | None
    thinking: bool
    effort: str | None

    @property
    def shown_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools that the model is told of."""
        return None if self.tool_choice == "none" else self.tools

    def constraint(self) -> StructuredOutput | None:
        """What the answer has to satisfy, behind its reasoning if it reasons.

        Raises:
            InvalidRequest: for options that cannot be obeyed together.
        """
        from .structured.openai import from_chat

        found = from_chat(
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.response_format,
        )
        if self.structured is None:
            return found
        if found is not None:
            raise InvalidRequest("structured", self.structured, "cannot be combined with response_format or tool calls")
        return self.structured


def listed_prompts(prompts: Any) -> list[Prompt]:
    """The prompts one by one; a flat list of integers is one prompt."""
    plain = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(plain, str | Mapping):
        return [plain]
    if not isinstance(plain, Sequence) or isinstance(plain, bytes | bytearray):
        raise TypeError(f"prompts must be a text, token ids, a dict, or a sequence of these, not {type(prompts).__name__}")
    if plain and all(isinstance(item, int) for item in plain):
        return [plain]
    return list(plain)


def listed_conversations(messages: Any) -> list[Sequence[Message]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes | bytearray):
        raise TypeError(f"messages must be a list of dicts, or a list of such lists, not {type(messages).__name__}")
    if messages and all(isinstance(item, Mapping) for item in messages):
        return [messages]
    return list(messages)


def params_for(params: Any, count: int) -> list[SamplingParams | None]:
    """One for each of `count` requests."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(p is None or isinstance(p, SamplingParams) for p in params):
        raise TypeError(f"sampling_params must be SamplingParams or a sequence of them, not {params!r}")
    if len(params) != count:
        raise InvalidRequest(
            "sampling_params", f"<{len(params)} of them>", f"must be one, or one for each of {count} requests"
        )
    return list(params)


def constraints_for(structured: Any, count: int) -> list[StructuredOutput | None]:
    """One for each of `count` requests."""
    if not isinstance(structured, list | tuple):
        return [structured] * count
    if len(structured) != count:
        raise InvalidRequest(
            "structured", f"<{len(structured)} of them>", f"must be one, or one for each of {count} requests"
        )
    return list(structured)


def prompt_maker(prompt: Prompt, params: SamplingParams | None, structured: StructuredOutput | None) -> Callable[[], Job]:
    return lambda: Job(_plain_prompt(prompt), with_length(params, DEFAULT_MAX_TOKENS), structured=structured)


def _plain_prompt(prompt: Any) -> str | Sequence[int]:
    """Text or ids of one prompt in any of its forms."""
    if isinstance(prompt, Mapping):
        if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
            return prompt["prompt"]
        if set(prompt) != {"prompt_token_ids"}:
            raise InvalidRequest("prompt", dict(prompt), 'must be {"prompt": text} or {"prompt_token_ids": ids}')
        prompt = prompt["prompt_token_ids"]
        if isinstance(prompt, str):
            raise InvalidRequest("prompt_token_ids", prompt, "must be a list of token ids")
    plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(plain, Sequence) or isinstance(plain, bytes | bytearray):
        raise InvalidRequest("prompt", prompt, "must be a text, a list of token ids, or a dict with one of them")
    return plain


def with_length(params: SamplingParams | None, default_max_tokens: int) -> SamplingParams:
    params = params if params is not None else SamplingParams()
    if params.max_tokens is not None:
        return params
    return replace(params, max_tokens=max(default_max_tokens, params.min_tokens))
