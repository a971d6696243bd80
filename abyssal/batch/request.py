"""From a line to what the engine is asked: prompts as token ids, sampling parameters, parsers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..core.errors import InvalidRequest
from ..core.sampling_params import SamplingParams
from ..prompts import DEFAULT_MAX_TOKENS, with_length
from ..structured.openai import from_chat
from ..structured.spec import from_response_format
from .body import Body, refuse_value
from .lines import CHAT_URL, BatchLine, LineRefused

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..structured.spec import StructuredOutput
    from ..text.chat import ChatParser

MAX_PARTS = 2048
"""Prompts times outputs of one line."""


@dataclass(frozen=True)
class Part:
    """One output of a line, and one request to the engine.

    Attributes:
        sample: 0 for a prompt's first output.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    sample: int = 0
    parser: ChatParser | None = None
    structured: StructuredOutput | None = None


@dataclass(frozen=True)
class LineRequest:
    """A line that can be computed.

    Attributes:
        parts: one a choice of the answer: the outputs of the first prompt, then those of the second, ..
        model: which of the served names the line asks for, None for whatever there is.
        returns_token_ids: the answer holds ids beside the text.
    """

    line: BatchLine
    parts: tuple[Part, ...]
    model: str | None
    returns_token_ids: bool

    @property
    def is_chat(self) -> bool:
        return self.line.url == CHAT_URL


class RequestReader:
    """Makes requests of lines, for one engine."""

    def __init__(self, engine: Engine, served_names: Sequence[str] = ()) -> None:
        """Read for an engine.

        Args:
            served_names: the names that lines may ask for; none to take any.
        """
        self._engine = engine
        self._served_names = tuple(served_names)
        self._job_seed = engine.config.seed or 0

    def read(self, line: BatchLine) -> LineRequest:
        """Check a line, render or tokenize its prompts.

        Raises:
            LineRefused: for a field that is unknown, or that cannot be obeyed.
            AbyssalError: for a value that is wrong.
        """
        body = Body(line.body)
        model = self._model(body.take("model"))
        returns_token_ids = bool(body.flag("return_token_ids"))
        try:
            parts = self._chat(line, body) if line.url == CHAT_URL else self._completion(line, body)
        except RecursionError as error:
            raise LineRefused("invalid_value", "body is nested too deeply", status=400) from error
        for part in parts:
            self._check_length(part)
        return LineRequest(line, parts, model, returns_token_ids)

    def _model(self, name: Any) -> str | None:
        if name is not None and not isinstance(name, str):
            raise InvalidRequest("model", name, "must be a string")
        if self._served_names and name is not None and name not in self._served_names:
            message = f"model={name!r:.80}: this job serves {', '.join(self._served_names)}"
            raise LineRefused("model_not_found", message, parameter="model", status=404)
        return name if self._served_names else None

    def _chat(self, line: BatchLine, body: Body) -> tuple[Part, ...]:
        messages = body.take("messages")
        tools, tool_choice = _tools(body)
        thinking, effort = _thinking(body)
        given = body.sampling(skip=frozenset(("logprobs",)))
        given |= _chat_logprobs(body) | _chat_length(body, given)
        constraint = from_chat(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=body.flag("parallel_tool_calls") is not False,
            response_format=body.take("response_format"),
        )
        params = self._params(line, given)
        body.refuse_unread()
        if self._engine.chat is None:
            raise InvalidRequest("messages", messages, "chat needs a tokenizer.json in the model folder")
        shown_tools = None if tool_choice == "none" else tools
        _check_number(1, params.n)
        prompt = self._engine.chat.render(messages, tools=shown_tools, thinking=thinking, effort=effort)
        params = with_length(params, prompt.default_max_tokens)
        if constraint is not None:
            constraint = constraint.after_reasoning(prompt.ends_in_reasoning)
        parts = _samples(prompt.token_ids, params, constraint)
        return tuple(replace(part, parser=prompt.parser(part.params)) for part in parts)

    def _completion(self, line: BatchLine, body: Body) -> tuple[Part, ...]:
        prompts = _prompts(body.take("prompt"))
        given = body.sampling()
        constraint = from_response_format(body.take("response_format"))
        params = with_length(self._params(line, given), DEFAULT_MAX_TOKENS)
        best_of = body.take("best_of")
        if best_of is not None and best_of != params.n:
            refuse_value("best_of", best_of, f"must equal n={params.n}: outputs are not ranked")
        body.refuse_unread()
        _check_number(len(prompts), params.n)
        parts: list[Part] = []
        for index, prompt in enumerate(prompts):
            is_seeded = index == 0 or "seed" in given
            own = params if is_seeded else replace(params, seed=self._seed(line, index))
            parts += _samples(self._token_ids(prompt), own, constraint)
        return tuple(parts)

    def _params(self, line: BatchLine, given: Mapping[str, Any]) -> SamplingParams:
        """Parameters of the first prompt; the others differ in the seed at most."""
        return SamplingParams(**given) if "seed" in given else SamplingParams(**given, seed=self._seed(line, 0))

    def _seed(self, line: BatchLine, index: int) -> int:
        """The seed of a prompt whose line has none: the same on every run, another one for every line."""
        content = json.dumps([self._job_seed, line.custom_id, line.body, index], sort_keys=True)
        return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little")

    def _token_ids(self, prompt: str | list[int]) -> Sequence[int]:
        """Ids of one prompt, with BOS in front where it was text."""
        if isinstance(prompt, str) and prompt and self._engine.tokenizer is not None:
            return self._engine.tokenizer.encode(prompt)
        if isinstance(prompt, str):
            reason = "is empty" if not prompt else "is text, but this model has no tokenizer; give token ids"
            raise InvalidRequest("prompt", prompt, reason)
        return prompt

    def _check_length(self, part: Part) -> None:
        num_tokens, limit = len(part.prompt_token_ids), self._engine.max_model_len
        if num_tokens >= limit:
            message = f"the prompt has {num_tokens} tokens; max_model_len={limit} must leave room for one more"
            raise LineRefused("context_length_exceeded", message, parameter="prompt", status=400)


def _check_number(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_PARTS:
        name, value = ("n", n) if n > MAX_PARTS else ("prompt", f"<{num_prompts} prompts, n={n}>")
        raise InvalidRequest(name, value, f"asks for more than {MAX_PARTS} outputs; use more lines")


def _samples(prompt_token_ids: Sequence[int], params: SamplingParams, constraint: StructuredOutput | None) -> list[Part]:
    """The outputs of one prompt, each with a seed of its own; the first one's is that of the prompt."""
    first = params if params.n == 1 else replace(params, n=1)
    parts = [Part(prompt_token_ids, first, structured=constraint)]
    for sample in range(1, params.n):
        digest = hashlib.blake2b(f"{params.seed} {sample}".encode(), digest_size=8).digest()
        own = replace(params, n=1, seed=int.from_bytes(digest, "little"))
        parts.append(Part(prompt_token_ids, own, sample, structured=constraint))
    return parts


def _prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completion: a text, ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("prompt", value, "must be a text, a list of token ids, or a list of these, not empty")
    if all(isinstance(item, int) for item in value):
        return [value]
    if not all(isinstance(item, str | list) for item in value):
        raise InvalidRequest("prompt", value, "must be a text, a list of token ids, or a list of these, not empty")
    return list(value)


def _tools(body: Body) -> tuple[list[Any] | None, Any]:
    """Tools and the choice among them, as they were given."""
    tools, choice = body.take("tools"), body.take("tool_choice")
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("tools", tools, "must be a list of function tools")
    if choice is not None and not tools and choice not in ("none", "auto"):
        raise InvalidRequest("tool_choice", choice, "has no meaning without tools")
    return tools or None, choice


def _thinking(body: Body) -> tuple[bool, str | None]:
    """Whether the model reasons first, and how much.

    Three spellings are known: DeepSeek's `thinking: {"type": "enabled"}`, OpenAI's `reasoning_effort`, and
    `chat_template_kwargs: {"thinking": true}`.
    """
    thinking, effort, template = body.take("thinking"), body.take("reasoning_effort"), body.take("chat_template_kwargs")
    wishes: dict[str, bool] = {}
    if thinking is not None:
        kinds = {"enabled": True, "disabled": False}
        if not isinstance(thinking, dict) or set(thinking) != {"type"} or thinking["type"] not in list(kinds):
            raise InvalidRequest("thinking", thinking, 'must be {"type": "enabled"} or {"type": "disabled"}')
        wishes["thinking"] = kinds[thinking["type"]]
    if template is not None:
        if not isinstance(template, dict) or set(template) != {"thinking"} or not isinstance(template["thinking"], bool):
            raise InvalidRequest("chat_template_kwargs", template, 'must be {"thinking": true} or {"thinking": false}')
        wishes["chat_template_kwargs"] = template["thinking"]
    if effort is not None:
        wishes["reasoning_effort"] = effort != "none"
    if len(set(wishes.values())) > 1:
        raise InvalidRequest(" and ".join(wishes), list(wishes.values()), "contradict each other")
    enabled = any(wishes.values())
    return enabled, effort if enabled else None


def _chat_logprobs(body: Body) -> dict[str, int]:
    """OpenAI's chat asks for log-probabilities by a truth value, and for alternatives by a number."""
    wanted, top = body.flag("logprobs"), body.take("top_logprobs")
    if top is not None and not wanted:
        raise InvalidRequest("top_logprobs", top, "needs logprobs=true")
    return {"logprobs": top or 0} if wanted else {}


def _chat_length(body: Body, given: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's newer name for max_tokens."""
    newer, older = body.take("max_completion_tokens"), given.get("max_tokens")
    if newer is None:
        return {}
    if older is not None and older != newer:
        raise InvalidRequest("max_completion_tokens", newer, f"contradicts max_tokens={older!r:.40}")
    return {"max_tokens": newer}
