"""An engine without a model, torch or tokenizer file: what it generates depends on prompt and seed alone, and a step gives
every running request one token. It is imported by tests and by the processes that tests kill."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from abyssal.config.engine import EngineConfig
from abyssal.core.batch import TokenLogprobs
from abyssal.core.errors import InvalidRequest
from abyssal.core.outputs import CompletionOutput, RequestOutput
from abyssal.core.sampling_params import SamplingParams

BOS = 0
FIRST, LAST = 33, 126


class ByteTokenizer:
    """One id a byte, 0 in front."""

    special_ids = frozenset({BOS})

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokenizer.json"

    def encode(self, text: str) -> list[int]:
        return [BOS, *text.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


@dataclass
class ScriptedParser:
    """Thinks for a token where it may, and calls the first tool where there is one."""

    thinking: bool
    tools: list[Any] | None
    ids: list[int] = field(default_factory=list)
    stop_string: str | None = None

    def push(self, token_id: int) -> None:
        self.ids.append(token_id)

    def finish(self) -> None:
        pass

    @property
    def text(self) -> str:
        return bytes(self.ids[1:] if self.thinking else self.ids).decode() if not self.tools else ""

    @property
    def reasoning(self) -> str | None:
        return bytes(self.ids[:1]).decode() if self.thinking else None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        if not self.tools or not self.ids:
            return []
        function = {"name": self.tools[0]["function"]["name"], "arguments": "{}"}
        return [{"id": f"random {time.monotonic_ns()}", "type": "function", "function": function}]


@dataclass
class ScriptedPrompt:
    token_ids: list[int]
    thinking: bool
    tools: list[Any] | None
    default_max_tokens: int = 9

    @property
    def ends_in_reasoning(self) -> bool:
        return self.thinking

    def parser(self, params: SamplingParams) -> ScriptedParser:
        return ScriptedParser(self.thinking, self.tools)


class ScriptedChat:
    """Renders a conversation as its contents, one behind the other. Remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def render(self, messages: Any, **options: Any) -> ScriptedPrompt:
        if not isinstance(messages, list):
            raise InvalidRequest("messages", messages, "must be a list of messages")
        self.asked.append(options)
        text = "".join(message["content"] for message in messages)
        return ScriptedPrompt([BOS, *text.encode()], options["thinking"], options["tools"])


@dataclass
class _Running:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    sink: Any
    length: int
    ids: list[int] = field(default_factory=list)
    steps: int = 0


def token(prompt: list[int], seed: int | None, index: int) -> int:
    """The token that a request generates at an index."""
    digest = hashlib.blake2b(repr((list(prompt), seed, index)).encode(), digest_size=4).digest()
    return FIRST + int.from_bytes(digest, "little") % (LAST - FIRST + 1)


def text_of(prompt: str, seed: int | None, length: int) -> str:
    """What is generated after a text."""
    return bytes(token([BOS, *prompt.encode()], seed, i) for i in range(length)).decode()


class ScriptedEngine:
    """Prompts that hold "!" fail while they run. Requests end by length, or by a stop after `stop_after` tokens. The first
    token comes `prefill_steps` steps after the first step, in which there is no output.

    Attributes:
        params: of every request that was added, by id.
        begun: ids of requests that were computed, in their order.
        most_unfinished: requests in the engine at a time.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 4,
        step_seconds: float = 0.0,
        stop_after: int = 10**9,
        prefill_steps: int = 0,
        folder: Path = Path("scripted"),
        **settings: Any,
    ) -> None:
        self.config = EngineConfig(max_num_seqs=max_num_seqs, **settings)
        self.tokenizer, self.chat = ByteTokenizer(folder), ScriptedChat()
        self.max_model_len = 200
        self.params: dict[str, SamplingParams] = {}
        self.begun: list[str] = []
        self.most_unfinished = self._num_in = self._num_out = 0
        self._step_seconds, self._stop_after, self._prefill_steps = step_seconds, stop_after, prefill_steps
        self._queue: dict[str, _Running] = {}
        self._aborted: list[RequestOutput] = []

    @property
    def engine(self) -> ScriptedEngine:
        """So that it passes for an LLM."""
        return self

    @property
    def has_unfinished(self) -> bool:
        return bool(self._queue)

    @property
    def stats(self) -> SimpleNamespace:
        running = min(len(self._queue), self.config.max_num_seqs)
        return SimpleNamespace(
            num_requests_running=running,
            num_requests_waiting=len(self._queue) - running,
            num_prompt_tokens=self._num_in,
            num_generation_tokens=self._num_out,
        )

    def add(
        self, prompt: list[int], params: SamplingParams, *, request_id: str, sink: Any = None, structured: Any = None
    ) -> str:
        assert request_id not in self.params, f"{request_id} is computed twice"
        if 255 in prompt:
            raise InvalidRequest("prompt", prompt, "holds an id that is unknown")
        assert params.n == 1, "several outputs are several requests"
        self.params[request_id] = params
        sink = sink or ScriptedParser(False, None)
        self._queue[request_id] = _Running(request_id, list(prompt), params, sink, params.max_tokens or 5)
        self.most_unfinished = max(self.most_unfinished, len(self._queue))
        return request_id

    def abort(self, request_id: str) -> None:
        running = self._queue.pop(request_id, None)
        if running is not None:
            self._aborted.append(self._output(running, "abort"))

    def step(self) -> list[RequestOutput]:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        outputs, self._aborted = self._aborted, []
        for running in list(self._queue.values())[: self.config.max_num_seqs]:
            self._begin(running)
            if running.steps > self._prefill_steps:
                outputs.append(self._advance(running))
                if outputs[-1].finished:
                    del self._queue[running.request_id]
        return outputs

    def close(self) -> None:
        self._queue.clear()

    def _begin(self, running: _Running) -> None:
        running.steps += 1
        if running.steps == 1:
            self.begun.append(running.request_id)
            self._num_in += len(running.prompt)

    def _advance(self, running: _Running) -> RequestOutput:
        new = token(running.prompt, running.params.seed, len(running.ids))
        running.ids.append(new)
        running.sink.push(new)
        self._num_out += 1
        if ord("!") in running.prompt:
            return self._output(running, "error")
        if len(running.ids) >= self._stop_after:
            return self._output(running, "stop")
        return self._output(running, "length" if len(running.ids) >= running.length else None)

    def _output(self, running: _Running, reason: str | None) -> RequestOutput:
        params = running.params
        completion = CompletionOutput(
            index=0,
            text=running.sink.text,
            token_ids=list(running.ids),
            logprobs=None if params.logprobs is None else [_logprobs(i, params.logprobs) for i in running.ids],
            finish_reason=reason,
            reasoning=running.sink.reasoning,
            tool_calls=running.sink.tool_calls,
        )
        told = None
        if params.prompt_logprobs is not None:
            told = [None, *(_logprobs(i, params.prompt_logprobs) for i in running.prompt[1:])]
        return RequestOutput(
            running.request_id,
            None,
            running.prompt,
            [completion],
            finished=reason is not None,
            prompt_logprobs=told,
            error="NaN in logits" if reason == "error" else None,
        )


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple((FIRST + k, -1.0 - k) for k in range(num_top))
    return TokenLogprobs(token_id, float("-inf") if token_id % 7 == 0 else -token_id / 8, 3, top)
