"""What one step computes: the scheduler's decision, and the flat tensors the model reads.

`SchedulerOutput` carries differences only: a runner keeps, for each state slot, the tokens and the block table of the
request that holds it. `ForwardBatch` holds tensors, but this module does not import torch at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SlotAssignment:
    """A request takes a state slot, at its first step or when it comes back after preemption.

    Attributes:
        token_ids: all tokens known so far (prompt, then output of an earlier run).
        num_prompt_tokens: how many of them are the prompt's; None for all.
        constraint: a `structured.Matcher` that the output has to satisfy, the same one for every stay; None for none.
    """

    request_id: str
    state_slot: int
    token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    wants_prompt_logits: bool = False
    num_prompt_tokens: int | None = None
    constraint: object | None = None


class ScheduledRows(NamedTuple):
    """The rows of one request in one step: positions `start .. start + num_rows - 1`.

    A scheduler that is ahead of the results plans the row of a token that is not known yet: `start` then is the last place
    where it may lie and `num_drafts` the most drafts that may be verified. The runner, which knows, puts exact numbers in
    their place before it computes anything.

    Attributes:
        first_new_block: index in the request's block table where `new_block_ids` go.
        samples: the last row that is no draft is the sequence's last known token, so that the next token is drawn from it.
        num_drafts: of these rows, the last ones hold the tokens that were drafted for the slot, from the first on.
        drafts_wanted: how many tokens to draft beyond those that this step draws.
        epoch: number of this stay of the request in its slot. Only the scheduler looks at it, to tell late results.
    """

    request_id: str
    state_slot: int
    start: int
    num_rows: int
    first_new_block: int
    new_block_ids: tuple[int, ...]
    samples: bool
    num_drafts: int = 0
    drafts_wanted: int = 0
    epoch: int = 0

    @property
    def num_logit_rows(self) -> int:
        """The last rows, whose logits decide the next tokens."""
        return 1 + self.num_drafts if self.samples else 0


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. Rows of different requests lie behind one another in the order of `rows`.

    Attributes:
        draft_rows: how many drafts are verified in all, if fewer than the rows have places for; the runner decides whose.
        observes: a drafter, if there is one, takes in these rows.
    """

    assignments: tuple[SlotAssignment, ...]
    rows: tuple[ScheduledRows, ...]
    draft_rows: int | None = None
    observes: bool = True

    @property
    def num_rows(self) -> int:
        num_drafts = sum(r.num_drafts for r in self.rows)
        spared = 0 if self.draft_rows is None else num_drafts - self.draft_rows
        return sum(r.num_rows for r in self.rows) - spared


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the raw logits.

    Attributes:
        token_id, logprob, rank: of the chosen token; the most likely one has rank 1.
        top: (id, logprob) of the most likely tokens, most likely first, lowest id first on ties.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SampledToken:
    """A token drawn for a request."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class StepTiming:
    """Seconds of a step: the target model's forward, drawing and verifying tokens, drafting new ones.

    Attributes:
        preparation: before them, to place rows and gather inputs.
    """

    forward: float
    sampling: float
    drafting: float
    preparation: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.sampling + self.drafting + self.preparation


@dataclass(frozen=True)
class RunnerOutput:
    """Results of one step, by request id.

    Attributes:
        sampled: tokens of the requests whose rows had `samples`, in order of position: accepted drafts and one more.
        verified: how many drafts were judged, of the requests that had any.
        drafts: for each token drafted for the step after, the logit of how likely it is accepted if those before it are.
        prompt_logprobs: for each prompt row of this step whose next token is known, in order of position.
        prompt_logits: float32 [rows, vocab] of this step, for requests that want them.
        errors: requests whose step failed, with the reason. They have no entry in the others.
        timing: how long the parts of the step took; None if that was not measured.
    """

    sampled: dict[str, list[SampledToken]] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logits: dict[str, torch.Tensor] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    timing: StepTiming | None = None


@dataclass(frozen=True)
class RingWrites:
    """Which rows of a step stay in the per-slot rings afterwards.

    Attributes:
        rows: int32 [M] row index in the step.
        dst: int32 [M] `state_slot * ring_size + position % ring_size`, no index twice.
    """

    rows: torch.Tensor
    dst: torch.Tensor


@dataclass(frozen=True)
class CompressionPlan:
    """Which compressed entries are completed in a step, for one ratio.

    Attributes:
        source: int32 [G, ratio]; >= 0 is a row of the step, otherwise `-1 - index` into the partial-group ring.
        dst: int32 [G] flat entry index `block_id * entries_per_block + offset`.
        positions: int32 [G] position of the group's first token (where the entry is rotated).
        partial: which rows stay in the partial-group ring.
    """

    source: torch.Tensor
    dst: torch.Tensor
    positions: torch.Tensor
    partial: RingWrites


@dataclass(frozen=True)
class ForwardBatch:
    """Flat inputs of one forward over T rows of R requests. All int32 and on the backend's device.

    Attributes:
        token_ids: [T].
        positions: [T].
        row_to_request: [T], index into the arrays of length R.
        query_start: [R + 1], rows of request r are `query_start[r] .. query_start[r + 1] - 1`.
        block_table: [R, max_blocks] block ids; entries past a request's length are 0 and never read.
        state_slot: [R].
        ngram_ids: [T, max_ngram] raw ids at p, p-1, ..; -1 before the start of the sequence.
        window: rows that stay in the window rings.
        compression: by ratio.
        logit_rows: [M] rows whose logits are wanted.
        window_start: [R] first position whose window rows exist; earlier ones are not attended to.
        max_context: largest position in the batch plus one.
        tail: the rows on which the decoder half runs, if not on all; its own batch, without tail.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    row_to_request: torch.Tensor
    query_start: torch.Tensor
    block_table: torch.Tensor
    state_slot: torch.Tensor
    ngram_ids: torch.Tensor
    window: RingWrites
    compression: dict[int, CompressionPlan]
    logit_rows: torch.Tensor
    window_start: torch.Tensor
    max_context: int
    tail: TailRows | None = None


@dataclass(frozen=True)
class TailRows:
    """Some rows of a batch, at the end of each request's.

    Attributes:
        rows: int32 [T'] row index in the whole batch.
        batch: the flat inputs of these rows alone. Its `compression` is empty: entries are written by all rows.
    """

    rows: torch.Tensor
    batch: ForwardBatch


@dataclass(frozen=True)
class DraftBatch:
    """Flat inputs of one pass of the drafter over R blocks of B rows. All int32 and on the backend's device.

    Attributes:
        token_ids: [R * B], each block's anchor and then noise.
        positions: [R * B].
        block_start: [R] position of the anchor, the newest token that is known; nothing of it lies in the caches yet.
        state_slot: [R].
        max_context: largest position in the batch plus one.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    block_start: torch.Tensor
    state_slot: torch.Tensor
    max_context: int
