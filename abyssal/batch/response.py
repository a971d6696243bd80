"""From outputs to answers: lines in the form of OpenAI's batch output, with the bodies of its API.

A body holds nothing that depends on when or beside what it was computed, so that a resumed job writes what an uninterrupted
one would have written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import AbyssalError, InvalidRequest
from ..core.outputs import CompletionOutput, RequestOutput
from .answers import ID_PREFIX, answer_id
from .lines import LineRefused
from .logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from .request import LineRequest, Part

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

_LINE_ENDS = tuple((c, f"\\u{ord(c):04x}") for c in "\x85\u2028\u2029")
"""Characters that some readers take for the end of a line, escaped so that every reader finds one line."""


class ResponseWriter:
    """Answers of one job."""

    def __init__(self, *, created: int, tag: str, model: str, tokenizer: Tokenizer | None) -> None:
        """Write for one job.

        Args:
            created: seconds since 1970, in every body.
            tag: of the job, 14 hex digits.
            model: the name that bodies have where the line named none.
        """
        self._created, self._tag, self._model = created, tag, model
        self._tokenizer = tokenizer

    def success(self, request: LineRequest, outputs: Sequence[RequestOutput]) -> bytes:
        """The answer of a line whose parts, one output for each, are finished."""
        number = request.line.number
        body = self._body(request, outputs)
        return self._line(number, request.line.custom_id, self._response(number, 200, body), None)

    def failure(self, number: int, custom_id: str | None, error: Exception) -> bytes:
        """The answer of a line that was refused or failed.

        A request has a response with the status and the body of the HTTP API; a line that was none has null there. `error`
        is set in both cases.
        """
        refused = as_refused(error)
        reason = {"code": refused.code, "message": str(refused), "param": refused.parameter}
        response = None
        if refused.status is not None:
            kind = "server_error" if refused.status >= 500 else "invalid_request_error"
            response = self._response(number, refused.status, {"error": {**reason, "type": kind}})
        return self._line(number, custom_id or refused.custom_id, response, {**reason, "line": number})

    def _line(
        self, number: int, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
    ) -> bytes:
        line = {"id": answer_id(number, self._tag), "custom_id": custom_id, "response": response, "error": error}
        try:
            return _dumped(line, ensure_ascii=False)
        except UnicodeEncodeError:  # half of a surrogate pair in an id, which JSON can spell and UTF-8 cannot
            return _dumped(line, ensure_ascii=True)

    def _response(self, number: int, status: int, body: dict[str, Any]) -> dict[str, Any]:
        return {"status_code": status, "request_id": f"req_{self._unique(number)}", "body": body}

    def _unique(self, number: int) -> str:
        return answer_id(number, self._tag).removeprefix(ID_PREFIX)

    def _body(self, request: LineRequest, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        prefix, kind = ("chatcmpl-", "chat.completion") if request.is_chat else ("cmpl-", "text_completion")
        pairs = list(zip(request.parts, outputs, strict=True))
        choices = [self._choice(request, part, output, position) for position, (part, output) in enumerate(pairs)]
        num_in = sum(len(output.prompt_token_ids) for part, output in pairs if part.sample == 0)
        num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
        body: dict[str, Any] = {
            "id": prefix + self._unique(request.line.number),
            "object": kind,
            "created": self._created,
            "model": request.model or self._model,
            "choices": choices,
            "usage": {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out},
            "system_fingerprint": f"fp_{self._tag}",
        }
        if request.is_chat:
            body |= self._prompt_fields(request, outputs[0])
        return body

    def _choice(self, request: LineRequest, part: Part, output: RequestOutput, position: int) -> dict[str, Any]:
        completion = output.outputs[0]
        reason = completion.finish_reason
        choice: dict[str, Any] = {"index": position}
        if request.is_chat:
            calls = self._tool_calls(request.line.number, position, completion)
            choice["message"] = _message(completion, calls)
            choice["logprobs"] = self._chat_logprobs(completion)
            reason = "tool_calls" if calls and reason == "stop" else reason
        else:
            choice["text"] = completion.text
            choice["logprobs"] = self._completion_logprobs(completion, part)
            choice |= self._prompt_fields(request, output)
        choice |= {"finish_reason": reason, "stop_reason": completion.stop_reason}
        if request.returns_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _tool_calls(self, number: int, position: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Calls with ids of the job in place of random ones."""
        named = []
        for index, call in enumerate(completion.tool_calls):
            unique = hashlib.sha256(f"{self._unique(number)} {position} {index}".encode()).hexdigest()[:24]
            named.append({**call, "id": f"call_{unique}"})
        return named

    def _chat_logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None or self._tokenizer is None:
            return None
        return chat_logprobs(completion.logprobs, self._tokenizer)

    def _completion_logprobs(self, completion: CompletionOutput, part: Part) -> dict[str, Any] | None:
        if completion.logprobs is None or self._tokenizer is None:
            return None
        hides = part.params.skip_special_tokens
        return completion_logprobs(completion.logprobs, self._tokenizer, skip_special_tokens=hides)

    def _prompt_fields(self, request: LineRequest, output: RequestOutput) -> dict[str, Any]:
        """What a line may ask to hear about its prompt."""
        told: dict[str, Any] = {}
        if output.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._tokenizer)
        if request.returns_token_ids:
            told["prompt_token_ids"] = output.prompt_token_ids
        return told


def as_refused(error: Exception) -> LineRefused:
    """What an error means for the line that it happened to."""
    if isinstance(error, LineRefused):
        return error
    if isinstance(error, InvalidRequest):
        return LineRefused("invalid_value", str(error), parameter=error.parameter, status=400)
    if isinstance(error, AbyssalError):
        return LineRefused("refused", str(error), status=400)
    return LineRefused("server_error", f"{type(error).__name__}: {error}", status=500)


def _message(completion: CompletionOutput, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": completion.text or (None if calls else "")}
    if completion.reasoning is not None:
        message["reasoning_content"] = completion.reasoning
    if calls:
        message["tool_calls"] = calls
    message["refusal"] = None
    return message


def _dumped(line: dict[str, Any], *, ensure_ascii: bool) -> bytes:
    text = json.dumps(line, ensure_ascii=ensure_ascii, separators=(",", ":"), allow_nan=False)
    for character, escaped in _LINE_ENDS:
        text = text.replace(character, escaped)
    return text.encode() + b"\n"
