"""AutoSpeculation: drafts while that pays, and costs next to nothing while it does not.

    PROBING -> does it pay? -> DRAFTING  as many drafts as are worth their rows
       ^           | no           | no longer
       |           v              v
    WARMING <-  RESTING        nothing is drafted, and the drafter does not even watch

In RESTING the expectation is looked at again now and then, for requests come and go: it pays for few what does not pay for
many. Acceptance, however, is only known from trying, so a small share of the time is saved up for a probe: a few drafts of a
few requests. Before it the drafter watches for a window's length, so that it is judged on what it can do.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from .acceptance import Acceptance, survivals
from .costs import StepCosts
from .speculation import Proposal, best_total

MIN_ADVANTAGE = 1.03
"""Drafting pays if it is expected to be faster by at least this factor: expectations are not exact."""

PROBE_SHARE = 0.01
"""Share of the time that goes into probes while drafting does not pay."""

WATCHING_SHARE = 0.05
"""What watching is assumed to cost of a step. It is less in all but the smallest models."""

FIRST_DRAFTS, PROBED_DRAFTS = 8, 4
"""Drafts that are judged before the first decision, and in each later probe."""

PROBED_REQUESTS = 4
"""Requests that draft at a time in a probe."""

EXPLORING_STEPS, EXPLORED_ROWS = 16, 2
"""Every so many steps, so many rows are verified beyond what seems best: costs that are never seen are never corrected."""

DECISION_STEPS = 8
"""Steps from one decision to the next, while the number of requests stays the same."""


class _State(enum.Enum):
    PROBING = "probing"
    DRAFTING = "drafting"
    RESTING = "resting"
    WARMING = "warming"


class AutoSpeculation:
    """Decides by measured costs and expected acceptance.

    Args:
        window: tokens that the drafter looks back.

    Attributes:
        observes: see `DraftRule`.
    """

    def __init__(self, costs: StepCosts, acceptance: Acceptance, window: int) -> None:
        self._costs, self._acceptance, self._window = costs, acceptance, window
        self._state = _State.PROBING
        self._goal = FIRST_DRAFTS
        self._savings = 0.0
        self._steps_left = 0
        self._num_requests = 0
        self._turn = self._num_steps = 0

    @property
    def observes(self) -> bool:
        return self._state is not _State.RESTING

    def total(self, proposals: Sequence[Proposal], other_rows: int, room: int) -> int:
        room = min(max(0, room - other_rows), sum(p.most for p in proposals))
        if self._state is not _State.DRAFTING:
            return min(room, sum(p.most > 0 for p in proposals))
        expected = [survivals(self._judged(p)) for p in proposals]
        drafting = self._costs.drafting_seconds(len(proposals))
        total, _ = best_total(len(proposals), expected, other_rows, room, self._costs, drafting)
        self._num_steps += 1
        return min(total + EXPLORED_ROWS, room) if self._num_steps % EXPLORING_STEPS == 0 else total

    def wanted(self, most: Sequence[int], other_rows: int, room: int) -> list[int]:
        most = [min(limit, self._acceptance.block_size) for limit in most]
        if not most:
            return most
        self._move(len(most))
        if self._state is _State.DRAFTING:
            # long prompts beside them are no reason to stop watching, but to draft nothing for a while
            return most if not other_rows or self._pays(most, other_rows, room - other_rows) else [0] * len(most)
        if self._state is _State.PROBING:
            return self._probe(most)
        return [0] * len(most)

    def _move(self, num_requests: int) -> None:
        """The next state, if it is time for another."""
        self._steps_left -= 1
        is_new_number, self._num_requests = num_requests != self._num_requests, num_requests
        if self._state is _State.PROBING:
            if self._acceptance.num_judged >= self._goal:
                self._decide(num_requests)
        elif self._state is _State.DRAFTING:
            if is_new_number or self._steps_left <= 0:
                self._decide(num_requests)
        elif self._state is _State.WARMING:
            if self._steps_left <= 0 and not self._decide(num_requests):
                self._state, self._goal = _State.PROBING, self._acceptance.num_judged + PROBED_DRAFTS
        else:
            self._rest(num_requests, is_new_number)

    def _decide(self, num_requests: int) -> bool:
        """Draft if it pays, rest if not."""
        pays = self._pays_alone(num_requests)
        self._state = _State.DRAFTING if pays else _State.RESTING
        self._steps_left, self._savings = DECISION_STEPS, 0.0
        return pays

    def _rest(self, num_requests: int, is_new_number: bool) -> None:
        self._savings += PROBE_SHARE * self._costs.seconds(num_requests, num_requests)
        if not is_new_number and self._steps_left > 0:
            return
        self._steps_left = DECISION_STEPS
        if self._pays_alone(num_requests) or self._savings >= self._price_of_probe(num_requests):
            self._state, self._steps_left = _State.WARMING, self._window

    def _pays_alone(self, num_requests: int) -> bool:
        """Whether drafting pays in steps of these requests alone."""
        block = self._acceptance.block_size
        return self._pays([block] * num_requests, 0, block * num_requests)

    def _pays(self, most: Sequence[int], other_rows: int, room: int) -> bool:
        """Whether a step with drafts is expected to gain more a second than one without, by earlier figures."""
        typical = survivals(self._acceptance.typical(self._acceptance.block_size))
        num_rows, num_drafting = len(most) + other_rows, sum(limit > 0 for limit in most)
        without = num_rows / self._costs.seconds(num_rows, len(most))
        drafting = self._costs.drafting_seconds(num_drafting)
        expected = [typical[:limit] for limit in most]
        total, speed = best_total(len(most), expected, other_rows, max(0, room), self._costs, drafting)
        return total > 0 and speed > MIN_ADVANTAGE * without

    def _price_of_probe(self, num_requests: int) -> float:
        probed = min(PROBED_REQUESTS, num_requests)
        alone = self._costs.seconds(num_requests, num_requests)
        more = self._costs.seconds(num_requests + probed, num_requests + probed) - alone
        num_steps = -(-PROBED_DRAFTS // probed)
        return self._window * WATCHING_SHARE * alone + num_steps * (more + self._costs.drafting_seconds(probed))

    def _probe(self, most: Sequence[int]) -> list[int]:
        """Drafts of a few requests, of others each time."""
        able = [i for i, limit in enumerate(most) if limit > 0]
        chosen = {able[(self._turn + k) % len(able)] for k in range(min(PROBED_REQUESTS, len(able)))}
        self._turn += PROBED_REQUESTS
        return [limit if i in chosen else 0 for i, limit in enumerate(most)]

    def _judged(self, proposal: Proposal) -> list[float]:
        """Conditional acceptance by figures that are older than the drafts at hand."""
        earlier = self._acceptance.conditional(proposal.earlier[: proposal.most])
        return earlier + self._acceptance.typical(proposal.most)[len(earlier) :]
