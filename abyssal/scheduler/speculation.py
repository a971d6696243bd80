"""How many drafted tokens a step verifies, whose, and whether new ones are drafted.

A row that verifies a draft costs what any row costs, and gives a token with the probability that all drafts up to it are
accepted, its *survival*. The total is the one with the most expected tokens for each second of a step; the rows go to the
highest survivals.

The total is decided when a step is scheduled, perhaps before its drafts exist; the runner, which has them, splits it.

**Why old figures decide the total.** With acceptance by rejection, output is distributed as without drafts only if
whether a draft is verified does not depend on the draft itself or on later ones. The confidence of draft k + 1 was computed
from draft k, so a total chosen by confidences of the drafts at hand would look at what it is about to judge. The total is
therefore computed from confidences of drafts that were judged already, and is then split by those of the drafts at hand.
The split is safe: survivals fall within a request, so a draft's own rank depends on earlier drafts of its request only, and
ties go to the earlier one. With coupled acceptance none of this matters for the output; one rule serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.batch import RunnerOutput, ScheduledRows, SchedulerOutput, StepTiming
from .acceptance import Acceptance, survivals
from .costs import StepCosts


@dataclass(frozen=True)
class Proposal:
    """Drafts of one request that may be verified in this step.

    Attributes:
        earlier: confidence logits of the drafts before these; empty if there were none.
        most: how many may be verified.
    """

    earlier: tuple[float, ...]
    most: int


class DraftRule(Protocol):
    """Decides on drafts, one step after another."""

    @property
    def observes(self) -> bool:
        """Whether the drafter takes in the rows of the step that `wanted` was asked for last.

        Without them its windows have holes, and drafts are worse until these have passed.
        """
        ...

    def total(self, proposals: Sequence[Proposal], other_rows: int, room: int) -> int:
        """How many drafts to verify, of all requests together.

        Args:
            proposals: one for each request that decodes in this step, which has a row without any draft.
            other_rows: rows of prompts that want to be in the step.
            room: rows that the step can take for drafts.
        """
        ...

    def wanted(self, most: Sequence[int], other_rows: int, room: int) -> list[int]:
        """How many tokens to draft for each request that draws a token in this step.

        Args:
            most: how many the next step could verify of each.
            other_rows, room: of the next step, as far as is known.
        """
        ...


def split_rows(total: int, current: Sequence[Sequence[float]]) -> list[int]:
    """Give `total` rows to the highest survivals, the earlier one on ties. Each list of survivals must not rise."""
    ranked = sorted(
        ((-survival, i) for i, values in enumerate(current) for survival in values),
        key=lambda pair: pair[0],
    )
    lengths = [0] * len(current)
    for _, i in ranked[:total]:
        lengths[i] += 1
    return lengths


def best_total(
    num_requests: int,
    expected: Sequence[Sequence[float]],
    other_rows: int,
    room: int,
    costs: StepCosts,
    drafting: float = 0.0,
) -> tuple[int, float]:
    """The number of draft rows with the most rows and tokens gained a second, the fewest on ties, and that speed.

    Rows of prompts count as gained too, or a long prompt beside them would make drafts look free.

    Args:
        num_requests: requests with a row of their own.
        expected: survivals of their drafts.
        drafting: seconds of the step that depend on neither.
    """
    tokens = float(num_requests)
    best, best_speed = 0, (tokens + other_rows) / (costs.seconds(num_requests + other_rows, tokens) + drafting)
    ranked = sorted((survival for values in expected for survival in values), reverse=True)
    for total, survival in enumerate(ranked[:room], 1):
        tokens += survival
        seconds = costs.seconds(num_requests + other_rows + total, tokens) + drafting
        speed = (tokens + other_rows) / seconds
        if speed > best_speed:
            best, best_speed = total, speed
    return best, best_speed


class FixedSpeculation:
    """Always `num_drafts`, as far as there is room."""

    observes = True

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def total(self, proposals: Sequence[Proposal], other_rows: int, room: int) -> int:
        return min(room, sum(min(self._num_drafts, proposal.most) for proposal in proposals))

    def wanted(self, most: Sequence[int], other_rows: int, room: int) -> list[int]:
        return [min(self._num_drafts, limit) for limit in most]


Recorder = Callable[[tuple[float, ...], int, int], None]
"""Told of judged drafts: their confidence logits, how many were verified, how many were accepted."""


class Speculation:
    """What a scheduler asks about drafts, and tells of them.

    Attributes:
        acceptance: counts, and what confidences are worth.
        recorder: None, or who is told of each request's judged drafts (calibration).
    """

    def __init__(self, rule: DraftRule, acceptance: Acceptance, costs: StepCosts | None = None) -> None:
        self._rule, self._costs = rule, costs
        self.acceptance = acceptance
        self.recorder: Recorder | None = None

    @property
    def observes(self) -> bool:
        """See `DraftRule`."""
        return self._rule.observes

    def total(self, proposals: Sequence[Proposal], other_rows: int, room: int) -> int:
        """See `DraftRule`."""
        return self._rule.total(proposals, other_rows, room)

    def split(self, total: int, current: Sequence[tuple[float, ...]]) -> list[int]:
        """How many drafts of each request to verify, `current` being the confidence logits of the drafts at hand."""
        return split_rows(total, [survivals(self.acceptance.conditional(logits)) for logits in current])

    def wanted(self, most: Sequence[int], other_rows: int, room: int) -> list[int]:
        """See `DraftRule`."""
        return self._rule.wanted(most, other_rows, room)

    def judged(
        self,
        drafts: tuple[float, ...],
        rows: ScheduledRows,
        num_verified: int,
        num_accepted: int,
        next_drafts: tuple[float, ...],
    ) -> None:
        """A request's rows came back: of its `drafts`, the first were accepted; the runner drafted `next_drafts`."""
        if rows.num_rows - rows.num_drafts == 1:
            self.acceptance.record_verified(drafts, num_verified, num_accepted)
            if self.recorder is not None and drafts:
                self.recorder(drafts, num_verified, num_accepted)
        self.acceptance.record_drafted(next_drafts)

    def observe(self, timing: StepTiming, scheduled: SchedulerOutput, result: RunnerOutput) -> None:
        """Learn from the time that a step took."""
        if self._costs is not None and all(rows.samples and rows.num_rows == rows.num_logit_rows for rows in scheduled.rows):
            num_tokens = sum(len(tokens) for tokens in result.sampled.values())
            num_rows = len(scheduled.rows) + sum(result.verified.values())
            self._costs.observe(timing, num_rows, num_tokens, len(result.drafts))
