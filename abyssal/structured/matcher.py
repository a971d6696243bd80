"""One sequence under a constraint: which tokens may come next, from its reasoning to the token that ends it.

A matcher passes through phases: reasoning (up to `</think>`), text (before tool calls that are optional), the grammar, and
done. Only the grammar needs an engine; the others have constant masks. Stop ids are allowed where the output so far is
complete, and nowhere else, whatever text they stand for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .grammar import Backend, EngineMatcher, GrammarError, Segment
from .mask import Mask, is_allowed, set_one
from .rules import OPENER, Phase, Rules, finish_rows


@dataclass(frozen=True)
class Filled:
    """Result of filling the rows of one matcher.

    Attributes:
        num_legal: how many of the drafts are allowed, from the first on; rows up to and including that index are filled.
        error: why the matcher cannot go on, or None.
    """

    num_legal: int
    error: str | None = None


@dataclass(frozen=True)
class _Step:
    phase_before: Phase
    token_id: int
    in_engine: bool


class Matcher:
    """One sequence. Not for use by several threads at once."""

    def __init__(self, rules: Rules, engine: EngineMatcher | None, phase: Phase) -> None:
        """`engine` is in its first state, None if the phases lead to no grammar."""
        self._rules = rules
        self._engine = engine
        self._phase = phase
        self._steps: list[_Step] = []

    @property
    def phase(self) -> Phase:
        """Where it is."""
        return self._phase

    @property
    def rules(self) -> Rules:
        """What it shares with others of its grammar."""
        return self._rules

    @property
    def num_tokens(self) -> int:
        """Tokens accepted so far, reasoning included."""
        return len(self._steps)

    @property
    def is_accepting(self) -> bool:
        """The output so far is complete: a stop id is allowed."""
        if self._phase is Phase.GRAMMAR:
            return self._grammar.is_accepting
        return self._phase is not Phase.REASONING or self._rules.reasoning_may_stop

    @property
    def is_finished(self) -> bool:
        """Nothing but a stop id can follow; the request may end here. This wins over `min_tokens` and `ignore_eos`."""
        if self._phase is Phase.GRAMMAR:
            return self._grammar.is_stopped and self._grammar.is_accepting
        return self._phase is Phase.DONE

    @property
    def _grammar(self) -> EngineMatcher:
        assert self._engine is not None, "the grammar phase needs an engine"
        return self._engine

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, if it is not allowed (also after the end)."""
        if not 0 <= token_id < self._rules.vocabulary.size:
            return False
        before = self._phase
        after = self._next_phase(before, token_id, self._tail())
        in_engine = before is Phase.GRAMMAR and after is Phase.GRAMMAR
        if after is None or (in_engine and not self._grammar.accept(token_id)):
            return False
        self._steps.append(_Step(before, token_id, in_engine))
        self._phase = after
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens, the end included."""
        assert 0 <= num_tokens <= len(self._steps), f"cannot roll back {num_tokens} of {len(self._steps)} tokens"
        if num_tokens == 0:
            return
        undone = self._steps[-num_tokens:]
        del self._steps[-num_tokens:]
        in_engine = sum(step.in_engine for step in undone)
        if in_engine:
            self._grammar.rollback(in_engine)
        self._phase = undone[0].phase_before

    def fork(self) -> Matcher:
        """An independent copy in the same state."""
        copy = Matcher(self._rules, self._engine.fork() if self._engine else None, self._phase)
        copy._steps = list(self._steps)
        return copy

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next: drafts that are certain to be accepted. Empty if there is a choice."""
        if self._phase is not Phase.GRAMMAR or self.is_finished:
            return []
        tail, forced = self._tail(), []
        for token_id in self._grammar.forced_tokens():
            if self._next_phase(Phase.GRAMMAR, token_id, tail) is not Phase.GRAMMAR:
                break
            forced.append(token_id)
            tail = self._extend(tail, token_id)
        return forced

    def fill(self, row: Mask) -> bool:
        """Write the mask of the next token into int32 [words]; False if it forbids nothing.

        After the end it allows the stop ids, so that no row is empty.

        Raises:
            GrammarError: if no token can follow, or a limit of the library is exceeded.
        """
        if self._phase is Phase.GRAMMAR:
            self._grammar.fill(row)
            accepting = is_allowed(row, self._rules.backend.eos_id)
            for token_id in self._rules.stop_ids:
                set_one(row, token_id, accepting)
        self._write(row, self._phase, self._tail())
        error = self._why_stuck(row)
        if error is not None:
            raise GrammarError(error)
        return self._phase is not Phase.REASONING or not self._rules.reasoning_is_free

    def begin_walk(self, masks: Mask, first_row: int, drafts: Sequence[int]) -> Walk:
        """Fill the rows that need no engine, up to the first illegal draft; `Walk` says what the engine has to fill."""
        phase, tail = self._phase, self._tail()
        for index in range(len(drafts) + 1):
            if phase is Phase.GRAMMAR:
                return Walk(self, first_row, drafts, index, self._engine_drafts(drafts[index:]))
            self._write(masks[first_row + index], phase, tail)
            if index == len(drafts) or phase is Phase.DONE or not is_allowed(masks[first_row + index], drafts[index]):
                return Walk(self, first_row, drafts, index, None)
            after = self._next_phase(phase, drafts[index], tail)
            assert after is not None, "a token that the mask allows leads somewhere"
            phase, tail = after, self._extend(tail, drafts[index])
        raise AssertionError("the walk ends inside the loop")

    def _engine_drafts(self, drafts: Sequence[int]) -> Sequence[int]:
        """Drafts up to the first stop id, which the engine must not take for text."""
        stop = next((i for i, token_id in enumerate(drafts) if token_id in self._rules.stop_ids), len(drafts))
        return drafts[:stop]

    def _write(self, row: Mask, phase: Phase, tail: bytes) -> None:
        """Write the mask of a phase; in the grammar phase, only forbid there what would spell markup."""
        rules = self._rules
        if phase is not Phase.GRAMMAR:
            row[:] = {Phase.REASONING: rules.reasoning, Phase.TEXT: rules.text, Phase.DONE: rules.done}[phase]
        if rules.marker is None or phase not in (Phase.TEXT, Phase.GRAMMAR):
            return
        if phase is Phase.TEXT and rules.calls_allowed and tail.endswith(OPENER) and rules.vocabulary.dsml_id is not None:
            set_one(row, rules.vocabulary.dsml_id, True)
        for token_id in rules.marker.completions(tail):
            set_one(row, token_id, False)

    def _next_phase(self, phase: Phase, token_id: int, tail: bytes) -> Phase | None:
        """Where a token leads, None if it is not allowed. In the grammar phase the engine has to agree."""
        rules = self._rules
        if token_id in rules.stop_ids:
            return self._after_stop(phase)
        if phase is Phase.REASONING:
            if token_id == rules.vocabulary.think_end_id:
                return rules.after_reasoning
            return phase if is_allowed(rules.reasoning, token_id) else None
        if phase is Phase.DONE:
            return None
        if rules.marker is not None and rules.marker.is_completed(tail, token_id):
            return None
        if phase is Phase.TEXT:
            if token_id == rules.vocabulary.dsml_id:
                return Phase.GRAMMAR if rules.calls_allowed and tail.endswith(OPENER) else None
            return phase if token_id in rules.vocabulary.text_ids else None
        return phase

    def _after_stop(self, phase: Phase) -> Phase | None:
        if phase is Phase.DONE:
            return None
        if phase is Phase.GRAMMAR:
            return Phase.DONE if self._grammar.is_accepting else None
        return Phase.DONE if phase is Phase.TEXT or self._rules.reasoning_may_stop else None

    def _tail(self) -> bytes:
        """The end of the text of the current phase, as long as markup may be."""
        if self._rules.marker is None:
            return b""
        tail = b""
        for step in reversed(self._steps):
            if len(tail) >= self._rules.marker.num_bytes or step.phase_before is Phase.REASONING:
                break
            tail = self._rules.vocabulary.tokenizer.token_bytes(step.token_id) + tail
        return tail[-self._rules.marker.num_bytes :]

    def _extend(self, tail: bytes, token_id: int) -> bytes:
        if self._rules.marker is None or token_id == self._rules.vocabulary.think_end_id:
            return b""
        return (tail + self._rules.vocabulary.tokenizer.token_bytes(token_id))[-self._rules.marker.num_bytes :]

    def _why_stuck(self, row: Mask) -> str | None:
        if self._phase is Phase.GRAMMAR:
            if self._grammar.error is not None:
                return self._grammar.error
            if self._grammar.is_stopped and not self._grammar.is_accepting:
                return "the grammar leads into a state from which nothing can follow"
        return (
            None
            if not self._rules.may_empty or row.any()
            else "no token can follow: the grammar needs one that is a stop id or spells markup"
        )


class Walk:
    """A matcher on its way through drafts. `segment` is filled by the engine between `begin_walk` and `finish`."""

    def __init__(
        self, matcher: Matcher, first_row: int, drafts: Sequence[int], index: int, engine_drafts: Sequence[int] | None
    ) -> None:
        self.matcher = matcher
        self._first_row = first_row
        self._drafts = drafts
        self._index = index
        self._engine_drafts = engine_drafts

    @property
    def segment(self) -> Segment | None:
        """What the engine has to fill, None if nothing."""
        if self._engine_drafts is None:
            return None
        return Segment(self.matcher._grammar, self._first_row + self._index, self._engine_drafts)

    @property
    def engine_rows(self) -> range:
        """Rows of `segment`."""
        first = self._first_row + self._index
        return range(first, first if self._engine_drafts is None else first + len(self._engine_drafts) + 1)

    @property
    def probes(self) -> tuple[Sequence[int], Sequence[int]]:
        """Rows of `segment` and the drafts that they have to allow."""
        rows = self.engine_rows
        drafts = self._drafts[self._index : self._index + len(rows)]
        return rows[: len(drafts)], drafts

    def forbid_markup(self, masks: Mask) -> None:
        """Forbid in the rows of `segment` what would spell markup."""
        matcher, index = self.matcher, self._index
        if matcher.rules.marker is None:
            return
        tail = matcher._tail()
        for token_id in self._drafts[:index]:
            tail = matcher._extend(tail, token_id)
        for row, token_id in zip(self.engine_rows, [-1, *(self._engine_drafts or ())], strict=False):
            tail = tail if token_id < 0 else matcher._extend(tail, token_id)
            matcher._write(masks[row], Phase.GRAMMAR, tail)

    def finish(self, masks: Mask, allowed: Sequence[bool]) -> Filled:
        """The result, after the engine has filled its rows and they have been corrected.

        Args:
            masks: int32 [rows, words].
            allowed: for each of `probes`, whether the row allows the draft.
        """
        if self._engine_drafts is None:
            return Filled(self._index)
        matcher, first = self.matcher, self._first_row + self._index
        error = matcher._why_stuck(masks[first]) if self._index == 0 else matcher._grammar.error
        if error is not None:
            return Filled(self._index, error)
        num_legal = next((i for i, legal in enumerate(allowed) if not legal), len(allowed))
        if num_legal > len(self._engine_drafts):  # a stop id among them: behind it nothing is legal
            num_legal = len(self._engine_drafts) + 1
            masks[first + num_legal] = matcher.rules.done
        return Filled(self._index + num_legal)


def fill_many(jobs: Iterable[tuple[Matcher, int, Sequence[int]]], masks: Mask) -> list[Filled]:
    """Fill the masks of many sequences and of their drafts at once. The matchers stay as they are.

    Args:
        jobs: matcher, index of its first row, draft ids. A job with n drafts owns n + 1 rows; those behind the first
            illegal draft are not to be used.
        masks: int32 [rows, words].
    """
    walks = [matcher.begin_walk(masks, first_row, drafts) for matcher, first_row, drafts in jobs]
    segments: dict[int, tuple[Backend, list[Segment]]] = {}
    rows: dict[int, tuple[Rules, list[int]]] = {}
    for walk in walks:
        rules, segment = walk.matcher.rules, walk.segment
        if segment is not None:
            segments.setdefault(id(rules.backend), (rules.backend, []))[1].append(segment)
            rows.setdefault(id(rules), (rules, []))[1].extend(walk.engine_rows)
    for backend, parts in segments.values():
        backend.fill(parts, masks)
    for rules, indices in rows.values():
        finish_rows(rules, masks, np.array(indices, dtype=np.int64))
    for walk in walks:
        walk.forbid_markup(masks)
    return _finish(walks, masks)


def _finish(walks: Sequence[Walk], masks: Mask) -> list[Filled]:
    """Look up all drafts in their rows at once."""
    probes = [walk.probes for walk in walks]
    rows = np.fromiter((row for part, _ in probes for row in part), dtype=np.int64)
    drafts = np.fromiter((token_id for _, part in probes for token_id in part), dtype=np.int64)
    inside = (drafts >= 0) & (drafts < masks.shape[1] * 32)
    words = masks[rows, np.where(inside, drafts >> 5, 0)]
    allowed: list[bool] = (inside & (((words >> (drafts & 31)) & 1) == 1)).tolist()
    results, start = [], 0
    for walk, (_, part) in zip(walks, probes, strict=True):
        results.append(walk.finish(masks, allowed[start : start + len(part)]))
        start += len(part)
    return results
