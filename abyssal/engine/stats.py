"""Plain figures of a running engine."""

from __future__ import annotations

from dataclasses import dataclass

from ..scheduler.acceptance import SpeculationStats


@dataclass(frozen=True)
class EngineStats:
    """A snapshot; counters run since the engine's start.

    Attributes:
        num_requests_running, num_requests_waiting: now.
        kv_cache_usage: share of the cache blocks in use, 0 to 1.
        num_preemptions, num_steps: so far.
        num_prompt_tokens: rows computed for known tokens, recomputation included.
        num_generation_tokens: tokens drawn.
        num_rows, num_decoder_rows: rows computed by the encoder and the decoder half of the layers.
        schedule_seconds, update_seconds: spent on deciding steps, and on their results.
        prepare_seconds, compute_seconds: spent by the runner on inputs, and on everything behind them.
        idle_seconds: for which the runner waited for its next step while there was work.
        speculation: figures of drafting; None without it.
    """

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_rows: int
    num_decoder_rows: int
    schedule_seconds: float
    update_seconds: float
    prepare_seconds: float
    compute_seconds: float
    idle_seconds: float
    speculation: SpeculationStats | None = None
