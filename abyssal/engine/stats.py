"""EngineStats: plain figures of a running engine; EngineCounters: what it counts for them as it goes."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.manager import CacheManager
from ..core.batch import StepTiming
from ..runner.model_runner import ModelRunner
from ..scheduler.acceptance import SpeculationStats
from ..scheduler.scheduler import Scheduler
from .pipeline import StepPipeline


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


@dataclass
class EngineCounters:
    """Counts and seconds since the engine's start, as in `EngineStats`."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    schedule_seconds: float = 0.0
    update_seconds: float = 0.0
    prepare_seconds: float = 0.0
    compute_seconds: float = 0.0

    def took(self, update_seconds: float, timing: StepTiming | None) -> None:
        """A step was computed in this time, and its results were taken in so many seconds."""
        self.num_steps += 1
        self.update_seconds += update_seconds
        if timing is not None:
            self.prepare_seconds += timing.preparation
            self.compute_seconds += timing.total - timing.preparation

    def snapshot(
        self, scheduler: Scheduler, cache: CacheManager, runner: ModelRunner, pipeline: StepPipeline, num_compiling: int
    ) -> EngineStats:
        """These counts, and what the parts of an engine say of themselves; `num_compiling` requests wait for a grammar."""
        speculation = scheduler.speculation
        return EngineStats(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting + num_compiling,
            kv_cache_usage=cache.usage,
            num_preemptions=scheduler.num_preemptions,
            num_rows=runner.num_rows,
            num_decoder_rows=runner.num_decoder_rows,
            idle_seconds=pipeline.idle_seconds,
            speculation=None if speculation is None else speculation.acceptance.stats(),
            **vars(self),
        )
