"""ModelRunner: executes a scheduled step. Owns the model, the cache tensors and the per-slot inputs."""

from __future__ import annotations

from typing import Protocol

import torch

from ..cache.storage import CacheStorage
from ..core.batch import ForwardBatch, RunnerOutput, SampledToken, ScheduledRows, SchedulerOutput, SlotAssignment, TokenLogprobs
from ..model.common import Caches
from .input_batch import BatchGeometry, InputBatch
from .sampler import SamplingRow, sample, token_logprobs


class Model(Protocol):
    """What a runner needs of a model."""

    def forward(self, batch: ForwardBatch, caches: Caches) -> torch.Tensor:
        """Logits float32 [M, V] of `batch.logit_rows`."""
        ...


class ModelRunner:
    """Runs steps one after another, in the order in which they were scheduled."""

    def __init__(self, model: Model, storage: CacheStorage, geometry: BatchGeometry) -> None:
        self._model, self._storage = model, storage
        self._inputs = InputBatch(geometry)
        self._assigned: dict[int, SlotAssignment] = {}

    @torch.inference_mode()
    def run(self, step: SchedulerOutput) -> RunnerOutput:
        """Compute a step's rows and draw the tokens that follow them."""
        for assignment in step.assignments:
            self._inputs.assign(assignment)
            self._assigned[assignment.state_slot] = assignment
        if not step.rows:
            return RunnerOutput()
        scored = frozenset(r.request_id for r in step.rows if _wants_prompt_rows(self._assigned[r.state_slot]))
        batch = self._inputs.gather(step, scored)
        logits = self._model.forward(batch, self._storage)
        return self._finish(step, scored, logits)

    def _finish(self, step: SchedulerOutput, scored: frozenset[str], logits: torch.Tensor) -> RunnerOutput:
        output = RunnerOutput()
        sampling: list[tuple[ScheduledRows, SamplingRow, int]] = []
        begin = 0
        for rows in step.rows:
            assigned = self._assigned[rows.state_slot]
            count = rows.num_rows if rows.request_id in scored else int(rows.samples)
            part = logits[begin : begin + count]
            begin += count
            if assigned.wants_prompt_logits:
                output.prompt_logits[rows.request_id] = part
            if assigned.params.prompt_logprobs is not None:
                output.prompt_logprobs[rows.request_id] = self._prompt_logprobs(rows, assigned, part)
            if rows.samples:
                row = SamplingRow(assigned.params, assigned.seed, rows.start + rows.num_rows)
                sampling.append((rows, row, begin - 1))
        drawn = sample(logits[[index for *_, index in sampling]], [row for _, row, _ in sampling]) if sampling else []
        for (rows, _, _), result in zip(sampling, drawn, strict=True):
            if isinstance(result, SampledToken):
                output.sampled[rows.request_id] = result
                self._inputs.append(rows.state_slot, result.token_id)
            else:
                output.errors[rows.request_id] = result
        return output

    def _prompt_logprobs(self, rows: ScheduledRows, assigned: SlotAssignment, logits: torch.Tensor) -> list[TokenLogprobs]:
        wanted = assigned.params.prompt_logprobs
        assert wanted is not None, f"request {rows.request_id} did not ask for prompt logprobs"
        following = self._inputs.next_ids(rows.state_slot, rows.start, rows.num_rows)
        return [token_logprobs(row, int(token), wanted) for row, token in zip(logits.numpy(), following, strict=False)]


def _wants_prompt_rows(assigned: SlotAssignment) -> bool:
    return assigned.wants_prompt_logits or assigned.params.prompt_logprobs is not None
