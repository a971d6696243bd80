"""Chat prompts of the model family and the parsing of its answers, by DeepSeek's own `deepseek-recipe`.

This is the only module that imports it. A conversation in OpenAI's form becomes token ids in which no user text can spell a
special token; the ids generated after it become reasoning, content and tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import deepseek_recipe as recipe

from ..core.errors import CheckpointError, InvalidRequest
from ..core.sampling_params import SamplingParams
from .detokenizer import IncrementalDetokenizer, TextBuffer
from .tokenizer import Tokenizer

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "ultra", "max")
"""Names of reasoning effort. They stand for three levels: 50 (minimal, low), 75 (medium, high, xhigh), 100 (ultra, max)."""

Messages = Sequence[Mapping[str, Any]]

_MODEL = "DeepSeek-V4.1-Flash"
_UNBOUNDED_CONTEXT = 2**31 - 1
_SHOWN_MARKUP = (recipe.SpecialToken.ThinkingStart, recipe.SpecialToken.ThinkingEnd, recipe.SpecialToken.Dsml)


@dataclass(frozen=True)
class ChatDelta:
    """What a token added to an answer.

    Attributes:
        tool_calls: pieces in OpenAI's streaming form: `index`, `id` and `function.name` first, then parts of the arguments.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


class ChatTemplate:
    """Turns conversations into prompts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Prepare the encoding.

        Raises:
            CheckpointError: if the tokenizer cannot be used for chat at all.
        """
        try:
            native = recipe.Tokenizer.from_str(tokenizer.json_text)
        except Exception as error:
            raise CheckpointError(f"tokenizer {tokenizer.path} cannot be used for chat: {error}") from error
        self._tokenizer = tokenizer
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(native)
        spelled = (tokenizer.token_id(token.default_str()) for token in _SHOWN_MARKUP)
        self._markup_ids = frozenset(i for i in spelled if i is not None)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        effort: str | None = None,
    ) -> ChatPrompt:
        """Encode a conversation up to where the assistant's next turn begins.

        Args:
            messages: dicts with `role` (system, user, assistant, tool, latest_reminder) and `content`, as in OpenAI's API.
                A last assistant message with `prefix: True` is continued.
            tools: function tools in OpenAI's form.
            effort: one of `EFFORTS`, only with `thinking`; None is "high".

        Raises:
            InvalidRequest: naming what is wrong and where.
        """
        request = _convert(_body(messages, tools, thinking, effort))
        for message in request.conversation.messages:
            if message.image_sources:
                raise InvalidRequest("messages", messages, "images are not supported; send text parts only")
        try:
            token_ids = self._encoding.encode(request.conversation)
        except RuntimeError as error:
            raise InvalidRequest(
                "messages",
                messages,
                f"the tokenizer cannot spell this chat prompt: {error}. "
                f"Use the tokenizer.json released with the checkpoint in place of {self._tokenizer.path}",
            ) from error
        return ChatPrompt(token_ids, request, self._tokenizer, self._markup_ids)


class ChatPrompt:
    """An encoded conversation.

    Attributes:
        token_ids: the prompt, BOS included.
        default_max_tokens: answer length where the user gives none: 8,192, when thinking 65,536, at full effort 131,072.
    """

    def __init__(
        self, token_ids: list[int], request: recipe.ConversationRequest, tokenizer: Tokenizer, markup_ids: frozenset[int]
    ) -> None:
        self.token_ids = token_ids
        self.default_max_tokens: int = request.resolve_max_tokens(len(token_ids), _UNBOUNDED_CONTEXT)
        self._request = request
        self._tokenizer = tokenizer
        self._markup_ids = markup_ids

    @property
    def ends_in_reasoning(self) -> bool:
        """Whether the answer goes on with reasoning: the last `<think>` of the prompt is open."""
        opened, closed = self._tokenizer.token_id("<think>"), self._tokenizer.token_id("</think>")
        last = next((i for i in reversed(self.token_ids) if i in (opened, closed)), None)
        return last is not None and last == opened

    def parser(self, params: SamplingParams) -> ChatParser:
        """A parser for one answer to this prompt."""
        end = self._tokenizer.token_id("</think>") if self.ends_in_reasoning else None
        detokenizer = IncrementalDetokenizer(self._tokenizer, params, keep=self._markup_ids, stop_behind=end)
        return ChatParser(detokenizer, self._request)


@dataclass
class _ToolCall:
    call_id: str
    name: str
    arguments: TextBuffer = field(default_factory=TextBuffer)

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": str(self.arguments)}}


class ChatParser:
    """Splits one answer into reasoning, content and tool calls while it is generated.

    It stands where `IncrementalDetokenizer` stands for plain text and is used in the same way. Stop strings are looked for
    in all that is generated behind the reasoning, markup included.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, request: recipe.ConversationRequest) -> None:
        options = request.parsing_options
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "", _MODEL)
        self._detokenizer = detokenizer
        self._processor = recipe.StreamProcessor(generator, options)
        self._content = TextBuffer()
        self._reasoning = TextBuffer() if request.conversation.thinking_mode else None
        self._calls: dict[int, _ToolCall] = {}
        self._finished = False

    @property
    def text(self) -> str:
        """The answer's content so far, without reasoning and tool calls."""
        return str(self._content)

    @property
    def reasoning(self) -> str | None:
        """The thinking part so far; None if thinking is off."""
        return None if self._reasoning is None else str(self._reasoning)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Calls so far, in OpenAI's form; the arguments of the last one may be incomplete."""
        return [self._calls[index].to_openai() for index in sorted(self._calls)]

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, or None."""
        return self._detokenizer.stop_string

    def push(self, token_id: int) -> ChatDelta:
        """Take the next id, except the one that ended the request by its id."""
        piece = self._detokenizer.push(token_id)
        return self._parse(piece) if piece else ChatDelta()

    def finish(self) -> ChatDelta:
        """End the answer and return what was held back. Harmless when repeated."""
        if self._finished:
            return ChatDelta()
        self._finished = True
        piece = self._detokenizer.finish()
        first = self._parse(piece) if piece else ChatDelta()
        last = self._collect(self._processor.finish())
        return ChatDelta(first.content + last.content, first.reasoning + last.reasoning, first.tool_calls + last.tool_calls)

    def _parse(self, piece: str) -> ChatDelta:
        return self._collect(self._processor.push(recipe.InferenceChunk.text(piece)))

    def _collect(self, chunks: Sequence[Any]) -> ChatDelta:
        """Add the chunks' deltas to what is known, and sum them up."""
        content, reasoning = "", ""
        calls: list[dict[str, Any]] = []
        for chunk in chunks:
            delta = json.loads(chunk.to_json())["choices"][0]["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            calls += delta.get("tool_calls") or []
        self._content.append(content)
        if self._reasoning is not None:
            self._reasoning.append(reasoning)
        for call in calls:
            self._add_call(call)
        return ChatDelta(content, reasoning, tuple(calls))

    def _add_call(self, piece: Mapping[str, Any]) -> None:
        function = piece["function"]
        if piece["index"] not in self._calls:
            self._calls[piece["index"]] = _ToolCall(piece["id"], function["name"])
        self._calls[piece["index"]].arguments.append(function.get("arguments") or "")


def _body(
    messages: Messages, tools: Sequence[Mapping[str, Any]] | None, thinking: bool, effort: str | None
) -> dict[str, Any]:
    """The conversation as the body of a chat completion request."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", messages, "must be a list of messages, each a dict with role and content")
    if not isinstance(thinking, bool):
        raise InvalidRequest("thinking", thinking, "must be True or False")
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest("effort", effort, f"must be one of {', '.join(EFFORTS)}")
    if effort is not None and not thinking:
        raise InvalidRequest("effort", effort, "has no meaning without thinking=True")
    body: dict[str, Any] = {
        "model": _MODEL,
        "messages": list(messages),
        "thinking": {"type": "enabled" if thinking else "disabled"},
    }
    if tools is not None:
        body["tools"] = list(tools)
    if effort is not None:
        body["reasoning_effort"] = effort
    return body


def _convert(body: dict[str, Any]) -> recipe.ConversationRequest:
    """Check the body and make a conversation of it.

    Raises:
        InvalidRequest: naming `tools` if the messages alone are fine, otherwise `messages`.
    """
    outcome = _try_convert(body)
    if isinstance(outcome, recipe.ConversationRequest):
        return outcome
    without_tools = {key: value for key, value in body.items() if key != "tools"}
    blameless = "tools" in body and isinstance(_try_convert(without_tools), recipe.ConversationRequest)
    culprit = "tools" if blameless else "messages"
    raise InvalidRequest(culprit, body[culprit], outcome)


def _try_convert(body: dict[str, Any]) -> recipe.ConversationRequest | str:
    """The conversation, or why the recipe does not accept it."""
    try:
        return recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    except (recipe.ConversionError, ValueError, TypeError) as error:
        return str(error).removeprefix("invalid request body: ")
