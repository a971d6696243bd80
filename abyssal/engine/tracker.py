"""RequestTracker: what the engine keeps of a request beside its scheduling, and how that becomes an output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..core.batch import SampledToken, TokenLogprobs
from ..core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from ..core.request import FinishReason, Request


class TextSink(Protocol):
    """Takes generated ids and holds the text they make: a detokenizer or a chat parser."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str | None: ...
    @property
    def tool_calls(self) -> list[dict[str, Any]]: ...
    @property
    def stop_string(self) -> str | None: ...
    def push(self, token_id: int) -> object: ...
    def finish(self) -> object: ...


class RequestTracker:
    """One request on its way out.

    Attributes:
        metrics: times of the request, filled as it goes.
        num_tokens: generated tokens taken so far.
    """

    def __init__(self, request: Request, prompt: str | None, sink: TextSink | None, vocab_size: int) -> None:
        self.request = request
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.num_tokens = 0
        self._prompt, self._sink = prompt, sink
        params = request.params
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._cumulative = 0.0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * request.num_prompt_tokens
        self._prompt_logits: torch.Tensor | None = None
        if request.wants_prompt_logits:
            self._prompt_logits = torch.zeros(request.num_prompt_tokens, vocab_size)

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has run into, if any."""
        return None if self._sink is None else self._sink.stop_string

    def take_prompt_rows(self, start: int, logprobs: Sequence[TokenLogprobs], logits: torch.Tensor | None) -> None:
        """Results of prompt rows beginning at position `start`; rows beyond the prompt are of no interest."""
        if self._prompt_logprobs is not None:
            for position, entry in enumerate(logprobs, start + 1):
                if position < len(self._prompt_logprobs):
                    self._prompt_logprobs[position] = entry
        if self._prompt_logits is not None and logits is not None:
            kept = logits[: max(0, len(self._prompt_logits) - start)]
            self._prompt_logits[start : start + len(kept)] = kept

    def take_token(self, sampled: SampledToken) -> None:
        """The next of the request's tokens, the last one of which may have ended it."""
        self.num_tokens += 1
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
        if self._logprobs is not None and sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs)
            self._cumulative += sampled.logprobs.logprob
        is_last = self.num_tokens == len(self.request.output_token_ids)
        ended_by_id = is_last and self.request.finish_reason is FinishReason.STOP
        if self._sink is not None and (not ended_by_id or self.request.params.include_stop_str_in_output):
            self._sink.push(sampled.token_id)

    def output(self) -> RequestOutput:
        """The request as it stands. Lists are the engine's own and grow until the request is finished."""
        request, sink = self.request, self._sink
        if request.is_finished and self.metrics.finished_time is None:
            self.metrics.finished_time = time.monotonic()
            self.metrics.num_preemptions = request.num_preemptions
            if sink is not None:
                sink.finish()
        reason, stop_reason = request.finish_reason, request.stop_reason
        if reason is FinishReason.LENGTH and self.stop_string is not None:
            reason, stop_reason = FinishReason.STOP, self.stop_string
        completion = CompletionOutput(
            index=0,
            text=sink.text if sink is not None else "",
            token_ids=request.output_token_ids,
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
            logprobs=self._logprobs,
            finish_reason=None if reason is None else str(reason),
            stop_reason=stop_reason,
            reasoning=sink.reasoning if sink is not None else None,
            tool_calls=sink.tool_calls if sink is not None else [],
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=request.is_finished,
            prompt_logprobs=self._prompt_logprobs,
            metrics=self.metrics,
            error=request.error,
            prompt_logits=self._prompt_logits if request.is_finished else None,
        )
