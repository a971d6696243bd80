"""What the user gets back. Names follow vLLM where the meaning is the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .batch import TokenLogprobs

if TYPE_CHECKING:
    import torch


@dataclass
class CompletionOutput:
    """One generated sequence.

    Attributes:
        text: generated text so far (empty without detokenization).
        token_ids: generated ids, the stopping one included.
        cumulative_logprob: sum over chosen tokens, None unless logprobs were asked for.
        logprobs: one a generated token, or None.
        finish_reason: "stop", "length", "abort", "error", or None while running.
        stop_reason: the stop id or stop string that ended it, None for EOS or another reason.
        reasoning: text of the thinking part, for chat requests.
        tool_calls: parsed calls in OpenAI's form, for chat requests.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class RequestMetrics:
    """Times in seconds of `time.monotonic`; None while unknown."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """A request and what came of it.

    Attributes:
        error: reason, when `outputs[0].finish_reason == "error"`; other requests are unaffected.
        prompt_logprobs: None for the first token, then one entry for each prompt token.
        prompt_logits: float32 [tokens, vocab], only for `Engine.score`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logits: torch.Tensor | None = None
