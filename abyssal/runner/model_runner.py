"""ModelRunner: executes a scheduled step. Owns the model, the cache tensors and the per-slot inputs.

resolve -> InputBatch.gather -> FlashModel.forward -> AcceptanceRule.verify -> Drafting.draft
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

import torch

from ..cache.storage import CacheStorage
from ..core.batch import (
    ForwardBatch,
    RunnerOutput,
    ScheduledRows,
    SchedulerOutput,
    SlotAssignment,
    StepTiming,
    TokenLogprobs,
)
from ..model.common import Caches
from ..structured.mask import Mask
from .constraints import Constraints
from .drafting import Drafting, DraftRequest
from .input_batch import BatchGeometry, InputBatch
from .logit_rules import LogitRules
from .resolve import resolve
from .sampler import Sampler
from .verify import CoupledAcceptance, Verification


class Model(Protocol):
    """What a runner needs of a model."""

    def forward(self, batch: ForwardBatch, caches: Caches, features: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Logits float32 [M, V] of `batch.logit_rows`; `features` takes what a drafter observes."""
        ...


class ModelRunner:
    """Runs steps one after another, in the order in which they were scheduled.

    Attributes:
        drafting: None, or what drafts tokens; may be exchanged while no request runs.
        num_rows, num_decoder_rows: computed so far by the encoder and the decoder half of the layers.
        last_features: what the drafter observed of the last rows of each request in the last step, None without a drafter.
    """

    def __init__(
        self,
        model: Model,
        storage: CacheStorage,
        geometry: BatchGeometry,
        sampler: Sampler,
        drafting: Drafting | None = None,
    ) -> None:
        self._model, self._storage, self._sampler = model, storage, sampler
        self._inputs = InputBatch(geometry)
        self._assigned: dict[int, SlotAssignment] = {}
        self._rules: dict[int, LogitRules | None] = {}
        self._confidences: dict[int, tuple[float, ...]] = {}  # of the drafts that a slot holds
        self._constraints = Constraints(sampler.roles.vocab_size)
        self.drafting = drafting
        self.num_rows = self.num_decoder_rows = 0
        self.last_features: torch.Tensor | None = None
        self._plain = CoupledAcceptance(sampler)

    @torch.inference_mode()
    def run(self, step: SchedulerOutput) -> RunnerOutput:
        """Compute a step's rows, draw the tokens that follow them, and draft those that may come after."""
        for assignment in step.assignments:
            self._assign(assignment)
        began = time.perf_counter()
        step = resolve(step, self._inputs, self._confidences, None if self.drafting is None else self.drafting.split)
        if not step.rows:
            return RunnerOutput()
        self._constraints.begin(
            [(r.state_slot, self._inputs.drafts(r.state_slot, r.num_drafts)) for r in step.rows if r.samples]
        )
        scored = frozenset(r.request_id for r in step.rows if _wants_prompt_rows(self._assigned[r.state_slot]))
        batch = self._inputs.gather(step, scored)
        gathered = time.perf_counter()
        self.num_rows += len(batch.token_ids)
        self.num_decoder_rows += len(batch.token_ids if batch.tail is None else batch.tail.rows)
        features: list[torch.Tensor] | None = [] if self.drafting is not None and step.observes else None
        logits = self._model.forward(batch, self._storage, features)
        if self.drafting is not None and features is not None:
            self.last_features = torch.cat(features, 1)
            observed = batch if batch.tail is None else batch.tail.batch
            self.drafting.model.observe(self.last_features, observed, self._storage)
        computed = time.perf_counter()
        output = self._finish(step, scored, logits)
        drawn = time.perf_counter()
        self._draft(step, output)
        timing = StepTiming(computed - gathered, drawn - computed, time.perf_counter() - drawn, gathered - began)
        return replace(output, timing=timing)

    def _assign(self, assignment: SlotAssignment) -> None:
        slot, num_prompt = assignment.state_slot, assignment.num_prompt_tokens
        self._confidences.pop(slot, None)
        self._inputs.assign(assignment, every_row=_wants_prompt_rows(assignment))
        self._assigned[slot] = assignment
        self._rules[slot] = self._sampler.rules_of(assignment.params, assignment.token_ids, num_prompt)
        num_output = 0 if num_prompt is None else len(assignment.token_ids) - num_prompt
        self._constraints.assign(slot, assignment.constraint, num_output)

    def _finish(self, step: SchedulerOutput, scored: frozenset[str], logits: torch.Tensor) -> RunnerOutput:
        output = RunnerOutput()
        sampling: list[tuple[ScheduledRows, Verification]] = []
        begin = 0
        for rows in step.rows:
            assigned = self._assigned[rows.state_slot]
            count = rows.num_rows if rows.request_id in scored else rows.num_logit_rows
            part = logits[begin : begin + count]
            begin += count
            if assigned.wants_prompt_logits:
                output.prompt_logits[rows.request_id] = part
            if assigned.params.prompt_logprobs is not None:
                output.prompt_logprobs[rows.request_id] = self._prompt_logprobs(rows, assigned, part)
            if rows.samples:
                masks = self._constraints.masks_of(rows.state_slot)
                if isinstance(masks, str):
                    output.errors[rows.request_id] = masks
                else:
                    sampling.append((rows, self._verification(rows, assigned, begin - 1 - rows.num_drafts, masks)))
        rule = self._plain if self.drafting is None else self.drafting.rule
        verified = rule.verify(logits, [verification for _, verification in sampling]) if sampling else []
        for (rows, _), result in zip(sampling, verified, strict=True):
            refused = result if isinstance(result, str) else self._append(rows.state_slot, [t.token_id for t in result])
            if refused is not None:
                output.errors[rows.request_id] = refused
            elif not isinstance(result, str):
                output.sampled[rows.request_id] = result
                if rows.num_drafts:
                    output.verified[rows.request_id] = rows.num_drafts
        return output

    def _append(self, slot: int, token_ids: list[int]) -> str | None:
        """Tokens of a slot were drawn; a reason if they break its constraint."""
        self._inputs.append(slot, token_ids)
        self._confidences.pop(slot, None)
        rules = self._rules[slot]
        if rules is not None:
            rules.append(token_ids)
        return self._constraints.accept(slot, token_ids)

    def _verification(
        self, rows: ScheduledRows, assigned: SlotAssignment, first_row: int, masks: Mask | None
    ) -> Verification:
        position = rows.start + rows.num_rows - rows.num_drafts
        draft_ids = self._inputs.drafts(rows.state_slot, rows.num_drafts)
        rules = self._rules[rows.state_slot]
        return Verification(rows.state_slot, first_row, draft_ids, assigned.params, assigned.seed, position, rules, masks)

    def _draft(self, step: SchedulerOutput, output: RunnerOutput) -> None:
        requests = []
        for rows in step.rows:
            sampled = output.sampled.get(rows.request_id)
            if rows.drafts_wanted and sampled is not None:
                assigned, position = self._assigned[rows.state_slot], self._inputs.num_tokens(rows.state_slot) - 1
                requests.append(
                    DraftRequest(
                        rows.request_id,
                        rows.state_slot,
                        sampled[-1].token_id,
                        position,
                        rows.drafts_wanted,
                        assigned.params,
                        assigned.seed,
                        self._rules[rows.state_slot],
                    )
                )
        if not requests:
            return
        assert self.drafting is not None, "drafts were scheduled, but nothing drafts"
        walk = self._constraints.walk([request.state_slot for request in requests])
        try:
            drafted = self.drafting.draft(requests, self._storage, walk)
        finally:
            if walk is not None:
                walk.close()
        for request, drafts in zip(requests, drafted, strict=True):
            self._inputs.set_drafts(request.state_slot, drafts.token_ids)
            confidence = tuple(drafts.confidence)
            self._confidences[request.state_slot] = output.drafts[request.request_id] = confidence

    def _prompt_logprobs(self, rows: ScheduledRows, assigned: SlotAssignment, logits: torch.Tensor) -> list[TokenLogprobs]:
        wanted = assigned.params.prompt_logprobs
        assert wanted is not None, f"request {rows.request_id} did not ask for prompt logprobs"
        following = self._inputs.next_ids(rows.state_slot, rows.start, rows.num_rows).tolist()
        return self._sampler.logprobs(logits, range(len(following)), following, [wanted] * len(following))


def _wants_prompt_rows(assigned: SlotAssignment) -> bool:
    return assigned.wants_prompt_logits or assigned.params.prompt_logprobs is not None
