"""Measures what steps cost, before any request is there: the figures that scheduling of drafts begins with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..config.engine import BLOCK_TOKENS
from ..config.model import TextConfig
from ..core.batch import ScheduledRows, SchedulerOutput, SlotAssignment, StepTiming
from ..core.sampling_params import SamplingParams
from .input_batch import BatchGeometry
from .model_runner import ModelRunner

MAX_SECONDS = 5.0
"""Measuring ends after the size at which this is exceeded; larger steps are extrapolated."""

REPEATS = 5
"""Of each size; the fastest counts, because other work on the machine only ever slows a step down."""

TOKEN_ID = 3
"""Any token will do."""


@dataclass(frozen=True)
class MeasuredCosts:
    """Points (rows or requests, seconds), and seconds for each token drawn."""

    forward: list[tuple[int, float]]
    drafting: list[tuple[int, float]]
    sampling: float


@dataclass(frozen=True)
class StepLimits:
    """What an engine allows.

    Attributes:
        context: tokens before those that are measured.
    """

    max_requests: int
    max_rows: int
    block_size: int
    context: int


def measure_costs(runner: ModelRunner, limits: StepLimits) -> MeasuredCosts:
    """Run steps of several sizes. Writes into free slots and blocks, which whoever takes them writes over."""
    forward: dict[int, list[float]] = {}
    drafting: dict[int, list[float]] = {}
    sampling: list[float] = []
    began = time.monotonic()
    for num_requests, rows_each in _sizes(limits):
        timings = _timings(runner, limits, num_requests, rows_each)
        forward.setdefault(num_requests * rows_each, []).append(min(t.forward for t in timings))
        drafting.setdefault(num_requests, []).append(min(t.drafting for t in timings))
        sampling.append(min(t.sampling for t in timings) / num_requests)
        if time.monotonic() - began > MAX_SECONDS:
            break
    return MeasuredCosts(
        [(count, min(seconds)) for count, seconds in forward.items()],
        [(count, min(seconds)) for count, seconds in drafting.items()],
        statistics.median(sampling),
    )


def _sizes(limits: StepLimits) -> Iterator[tuple[int, int]]:
    """(requests, rows of each), from small steps to large ones."""
    for rows_each in range(1, 2 + limits.block_size):
        if rows_each <= limits.max_rows:
            yield 1, rows_each
    num_requests = 2
    while num_requests <= limits.max_requests:
        for rows_each in (1, 2, 1 + limits.block_size):
            if num_requests * rows_each <= limits.max_rows:
                yield num_requests, rows_each
        num_requests *= 2


def _timings(runner: ModelRunner, limits: StepLimits, num_requests: int, rows_each: int) -> list[StepTiming]:
    """Of steps that verify drafts, each after a step that made them."""
    known = limits.context + 1
    num_blocks = -(-(known + _most_more(limits.block_size)) // BLOCK_TOKENS)
    params = SamplingParams(temperature=1.0)
    names = [f"measured-{i}" for i in range(num_requests)]
    assignments = [SlotAssignment(name, i, (TOKEN_ID,) * known, params, seed=i) for i, name in enumerate(names)]
    drafting = [
        ScheduledRows(
            name,
            state_slot=i,
            start=limits.context,
            num_rows=1,
            first_new_block=0,
            new_block_ids=tuple(range(i * num_blocks, (i + 1) * num_blocks)),
            samples=True,
            drafts_wanted=limits.block_size,
        )
        for i, name in enumerate(names)
    ]
    first = SchedulerOutput(tuple(assignments), tuple(drafting))
    measured = SchedulerOutput((), tuple(r._replace(num_rows=rows_each, num_drafts=rows_each - 1) for r in drafting))
    timings = []
    for _ in range(1 + REPEATS):
        runner.run(first)
        timings.append(runner.run(measured).timing)
    return [timing for timing in timings[1:] if timing is not None]


def _most_more(block_size: int) -> int:
    """Tokens behind the known ones: one, a step with all drafts accepted, and drafts behind it."""
    return 2 + 2 * block_size


def limits_for(geometry: BatchGeometry, num_blocks: int, max_rows: int, text: TextConfig) -> StepLimits:
    """Limits that keep every measured request in slots and blocks of its own."""
    block_size = text.dspark_block_size
    context = max(0, min(text.sliding_window, geometry.max_model_len - 1 - _most_more(block_size)))
    blocks_each = -(-(context + 1 + _most_more(block_size)) // BLOCK_TOKENS)
    max_requests = max(1, min(geometry.num_slots, num_blocks // blocks_each))
    return StepLimits(max_requests, max_rows, block_size, context)
