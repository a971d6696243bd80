"""Constraints: the matchers of the requests in a runner's slots, and their masks, filled beside the model.

begin (a step's rows are known; threads fill masks while the forward runs) -> masks_of -> accept -> walk (drafts)
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from ..structured.mask import Mask, allocate
from ..structured.matcher import Filled, Matcher, fill_many
from ..structured.rules import Phase

Job = tuple[Matcher, int, Sequence[int]]
"""A matcher, its first row, and the drafts whose rows lie behind that."""


class Filler(Protocol):
    """Fills masks in the background."""

    def __call__(self, jobs: Sequence[Job], num_rows: int) -> Future[tuple[Mask, list[Filled]]]: ...


class Constraints:
    """Matchers by state slot. A matcher belongs to its request and goes with it from slot to slot."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._matchers: dict[int, Matcher] = {}
        self._filling: Future[tuple[Mask, list[Filled]]] | None = None
        self._jobs: dict[int, tuple[int, Job]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def assign(self, slot: int, constraint: object | None, num_output_tokens: int) -> None:
        """A request takes a slot with some tokens of output; `constraint` is its matcher, None for none."""
        self._join()
        self._matchers.pop(slot, None)
        if constraint is None:
            return
        assert isinstance(constraint, Matcher), f"slot {slot}: {type(constraint).__name__} is no matcher"
        # what was drawn in a step that came back after the request was preempted is drawn again
        constraint.rollback(constraint.num_tokens - num_output_tokens)
        self._matchers[slot] = constraint

    def begin(self, drawing: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Start filling the masks of a step: for each slot that draws, of the next token and of those behind its drafts."""
        self._join()
        self._jobs, num_rows = {}, 0
        for slot, drafts in drawing:
            if slot in self._matchers:
                self._jobs[slot] = (len(self._jobs), (self._matchers[slot], num_rows, drafts))
                num_rows += 1 + len(drafts)
        self._filling = self._fill([job for _, job in self._jobs.values()], num_rows) if self._jobs else None

    def masks_of(self, slot: int) -> Mask | str | None:
        """int32 [1 + drafts, words] of a slot in this step; None without a constraint, a reason if it cannot go on."""
        if slot not in self._jobs or self._filling is None:
            return None
        masks, results = self._filling.result()
        index, (_, first_row, drafts) = self._jobs[slot]
        error = results[index].error
        return masks[first_row : first_row + 1 + len(drafts)] if error is None else error

    def accept(self, slot: int, token_ids: Sequence[int]) -> str | None:
        """Tokens were drawn for good; a reason if the constraint does not hold, which fails the request."""
        self._join()
        matcher = self._matchers.get(slot)
        for token_id in token_ids if matcher is not None else ():
            assert matcher is not None, "no tokens are looked at without a matcher"
            if matcher.phase is Phase.DONE:
                return None  # tokens behind the end are cut off
            if not matcher.accept(token_id):
                return f"token {token_id} was drawn, which the grammar does not allow after {matcher.num_tokens} tokens"
        return None

    def walk(self, slots: Sequence[int]) -> DraftWalk | None:
        """A walk ahead of the known tokens of these slots; None if none is under a constraint."""
        self._join()
        matchers = [self._matchers.get(slot) for slot in slots]
        return None if all(m is None for m in matchers) else DraftWalk(matchers, self._fill)

    def _fill(self, jobs: Sequence[Job], num_rows: int) -> Future[tuple[Mask, list[Filled]]]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "abyssal-masks")
        masks = allocate(num_rows, self._vocab_size)
        return self._pool.submit(lambda: (masks, _fill_apart(jobs, masks)))

    def _join(self) -> None:
        """Matchers are used by one thread at a time."""
        if self._filling is not None:
            self._filling.exception()


class DraftWalk:
    """Matchers that run ahead of their sequences while drafts are drawn one place after another.

    Attributes:
        certain: for each request, for each place so far: nothing but the drafted token may stand there.
    """

    def __init__(self, matchers: Sequence[Matcher | None], fill: Filler) -> None:
        self._matchers, self._fill = list(matchers), fill
        self._num_accepted = [0] * len(matchers)
        self._started = list(matchers)
        self.certain: list[list[bool]] = [[] for _ in matchers]
        self._filling: Future[tuple[Mask, list[Filled]]] | None = None
        self._begin()

    def masks(self) -> list[Mask | None]:
        """int32 [words] of the next place, for each request; None where anything goes."""
        found: list[Mask | None] = [None] * len(self._matchers)
        if self._filling is not None:
            masks, results = self._filling.result()
            for i, row, result in zip(self._active(), masks, results, strict=True):
                if result.error is None:
                    found[i] = row
                else:
                    self._matchers[i] = None  # the request fails when its next token is drawn
        for places, mask in zip(self.certain, found, strict=True):
            places.append(mask is not None and _allows_one(mask))
        return found

    def advance(self, token_ids: Sequence[int]) -> None:
        """Drafts were drawn for that place."""
        for i in self._active():
            matcher = self._matchers[i]
            assert matcher is not None, "active means that it has a matcher"
            if matcher.accept(token_ids[i]):
                self._num_accepted[i] += 1
            else:
                self._matchers[i] = None  # behind an end, or behind a draft from logits that are no numbers
        self._begin()

    def close(self) -> None:
        """Take the matchers back to where they were."""
        if self._filling is not None:
            self._filling.exception()
        for matcher, count in zip(self._started, self._num_accepted, strict=True):
            if matcher is not None:
                matcher.rollback(count)

    def _active(self) -> list[int]:
        return [i for i, matcher in enumerate(self._matchers) if matcher is not None]

    def _begin(self) -> None:
        matchers = [matcher for matcher in self._matchers if matcher is not None]
        jobs: list[Job] = [(matcher, row, ()) for row, matcher in enumerate(matchers)]
        self._filling = self._fill(jobs, len(jobs)) if jobs else None


def _fill_apart(jobs: Sequence[Job], masks: Mask) -> list[Filled]:
    """Fill all; if that fails, one by one, so that one request's failure is its own."""
    try:
        return fill_many(jobs, masks)
    except Exception:
        return [_fill_one(job, masks) for job in jobs]


def _fill_one(job: Job, masks: Mask) -> Filled:
    try:
        return fill_many([job], masks)[0]
    except Exception as error:
        return Filled(0, f"the grammar library failed: {error}")


def _allows_one(mask: Mask) -> bool:
    words = mask[np.flatnonzero(mask)]
    return len(words) == 1 and (int(words[0]) & 0xFFFFFFFF).bit_count() == 1
