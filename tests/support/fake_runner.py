"""A model runner without a model: it checks what it is told to compute, and draws tokens that depend on every token fed.

It keeps, for each state slot, what a real runner keeps (tokens, block table), and for each block what a real cache would
hold (whose rows, how many). A row that is computed twice or skipped, a block that two requests write, a table that is too
short or a token that got lost therefore fails an assertion or changes the tokens that follow.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from abyssal.config.engine import BLOCK_TOKENS
from abyssal.core.batch import RunnerOutput, SampledToken, ScheduledRows, SchedulerOutput, SlotAssignment, StepTiming

_MASK = (1 << 64) - 1


def extend_digest(digest: int, token_ids: Sequence[int]) -> int:
    """Fold tokens into a 64-bit digest of all tokens before them."""
    for token_id in token_ids:
        digest = ((digest ^ token_id) * 0x9E3779B97F4A7C15 + 1) & _MASK
    return digest


def draw_token(digest: int, seed: int, vocab_size: int) -> int:
    """The token that follows a prefix."""
    return (extend_digest(digest, (seed,)) >> 32) % vocab_size


def continuation(prompt_token_ids: Sequence[int], seed: int, vocab_size: int, num_tokens: int) -> list[int]:
    """What a request generates if nothing stops it, computed without any scheduler."""
    digest, output = extend_digest(0, prompt_token_ids), []
    for _ in range(num_tokens):
        output.append(draw_token(digest, seed, vocab_size))
        digest = extend_digest(digest, output[-1:])
    return output


@dataclass
class _Slot:
    request_id: str
    stay: int
    tokens: list[int]
    seed: int
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    digest: int = 0
    drafts: list[int] = field(default_factory=list)


class FakeRunner:
    """Runs steps in the order given.

    Attributes:
        failing: ids of requests whose next step fails.
        num_rows: rows computed so far.
        num_verified, num_accepted: drafts so far. A draft is the right token with probability 0.7.
        assignments: (request id, known tokens) of every assignment so far.
    """

    def __init__(self, num_blocks: int, num_slots: int, vocab_size: int = 50) -> None:
        self.vocab_size = vocab_size
        self.failing: set[str] = set()
        self.num_rows = self.num_verified = self.num_accepted = 0
        self.assignments: list[tuple[str, int]] = []
        self._slots: list[_Slot | None] = [None] * num_slots
        self._blocks: list[tuple[int, int]] = [(-1, 0)] * num_blocks
        self._random = random.Random(num_blocks)

    def run(self, scheduled: SchedulerOutput) -> RunnerOutput:
        """Check and compute one step."""
        for assignment in scheduled.assignments:
            self._assign(assignment)
        self._check_step(scheduled)
        sampled, drafts, errors, verified = {}, {}, {}, {}
        for rows in self._resolve(scheduled):
            token_ids = self._compute(rows)
            verified[rows.request_id] = rows.num_drafts
            if rows.request_id in self.failing:
                self.failing.discard(rows.request_id)
                errors[rows.request_id] = "not a number in layer 3"
            elif token_ids:
                sampled[rows.request_id] = [SampledToken(token_id) for token_id in token_ids]
                drafts[rows.request_id] = self._draft(self._slot_of(rows), rows.drafts_wanted)
        seconds = 1e-3 * (1 + 0.1 * scheduled.num_rows)
        return RunnerOutput(sampled, verified, drafts, errors=errors, timing=StepTiming(seconds, 1e-5, 1e-4))

    def _assign(self, assignment: SlotAssignment) -> None:
        stay = len(self.assignments)
        self.assignments.append((assignment.request_id, len(assignment.token_ids)))
        self._slots[assignment.state_slot] = _Slot(assignment.request_id, stay, list(assignment.token_ids), assignment.seed)

    def _check_step(self, scheduled: SchedulerOutput) -> None:
        slots = [rows.state_slot for rows in scheduled.rows]
        assert len(set(slots)) == len(slots), f"two rows of one step share a slot: {slots}"
        assigned = {a.request_id for a in scheduled.assignments}
        assert assigned <= {rows.request_id for rows in scheduled.rows}, "a request got a slot but no rows"
        blocks = [b for rows in scheduled.rows for b in (*self._slot_of(rows).table, *rows.new_block_ids)]
        assert len(set(blocks)) == len(blocks), f"requests of one step share a block: {sorted(blocks)}"

    def _resolve(self, scheduled: SchedulerOutput) -> list[ScheduledRows]:
        """Rows of single tokens where the tokens end; any choice of drafts, as many as the step says."""
        resolved, most = [], []
        for rows in scheduled.rows:
            slot = self._slot_of(rows)
            if rows.samples and rows.num_rows - rows.num_drafts == 1:
                assert len(slot.tokens) - 1 <= rows.start, f"{rows.request_id}: planned before its last token"
                rows = rows._replace(start=len(slot.tokens) - 1)
            room = BLOCK_TOKENS * (len(slot.table) + len(rows.new_block_ids)) - rows.start - 1
            if room >= 0:
                resolved.append(rows)
                most.append(min(rows.num_drafts, len(slot.drafts), room))
        total = sum(most) if scheduled.draft_rows is None else min(scheduled.draft_rows, sum(most))
        lengths = [0] * len(most)
        for _ in range(total):
            lengths[self._random.choice([i for i, length in enumerate(lengths) if length < most[i]])] += 1
        return [
            rows._replace(num_rows=rows.num_rows - rows.num_drafts + length, num_drafts=length)
            for rows, length in zip(resolved, lengths, strict=True)
        ]

    def _slot_of(self, rows: ScheduledRows) -> _Slot:
        slot = self._slots[rows.state_slot]
        assert slot is not None, f"slot {rows.state_slot} was never assigned"
        assert slot.request_id == rows.request_id, f"slot {rows.state_slot} is {slot.request_id}'s, not {rows.request_id}'s"
        return slot

    def _draft(self, slot: _Slot, count: int) -> tuple[float, ...]:
        right = continuation(slot.tokens, slot.seed, self.vocab_size, count)
        slot.drafts = [t if self._random.random() < 0.7 else self._random.randrange(self.vocab_size) for t in right]
        return tuple(self._random.gauss(1.0, 1.0) for _ in slot.drafts)

    def _compute(self, rows: ScheduledRows) -> list[int]:
        slot, end = self._slot_of(rows), rows.start + rows.num_rows - rows.num_drafts
        assert not rows.num_drafts or rows.samples, f"{rows.request_id}: drafts behind a row that does not sample"
        assert rows.num_drafts <= len(slot.drafts), f"{rows.request_id}: {rows.num_drafts} of {len(slot.drafts)} drafts"
        drafts, slot.drafts = slot.drafts[: rows.num_drafts], []
        assert rows.num_rows > rows.num_drafts, f"{rows.request_id} has no rows of its own"
        assert rows.start == slot.num_computed, f"{rows.request_id}: rows from {rows.start}, computed {slot.num_computed}"
        assert end <= len(slot.tokens), f"{rows.request_id}: rows up to {end}, known tokens {len(slot.tokens)}"
        assert rows.samples == (end == len(slot.tokens)), f"{rows.request_id}: samples={rows.samples} at {end}"
        assert rows.first_new_block == len(slot.table), f"{rows.request_id}: table has {len(slot.table)} blocks"
        slot.table.extend(rows.new_block_ids)
        num_written = end + rows.num_drafts
        assert len(slot.table) * BLOCK_TOKENS >= num_written, f"{rows.request_id}: {num_written} rows need more blocks"
        slot.digest = extend_digest(slot.digest, slot.tokens[rows.start : end])
        self.num_rows += rows.num_rows
        token_ids = self._draw(slot, drafts) if rows.samples else []
        end += max(0, len(token_ids) - 1)
        self._read_and_write(slot, end, num_written)
        slot.num_computed = end
        return token_ids

    def _draw(self, slot: _Slot, drafts: list[int]) -> list[int]:
        """The next token, and one more for each draft that is what comes next."""
        token_ids = [draw_token(slot.digest, slot.seed, self.vocab_size)]
        for draft in drafts:
            if draft != token_ids[-1]:
                break
            slot.digest = extend_digest(slot.digest, [draft])
            token_ids.append(draw_token(slot.digest, slot.seed, self.vocab_size))
        slot.tokens += token_ids
        self.num_verified += len(drafts)
        self.num_accepted += len(token_ids) - 1
        return token_ids

    def _read_and_write(self, slot: _Slot, end: int, num_written: int) -> None:
        """Rows up to `end` count; those behind them are written too, and hold nothing afterwards."""
        for i, block_id in enumerate(slot.table):
            first = i * BLOCK_TOKENS
            num_before = min(max(slot.num_computed - first, 0), BLOCK_TOKENS)
            num_after = min(max(end - first, 0), BLOCK_TOKENS)
            if num_before:
                held = self._blocks[block_id]
                assert held == (slot.stay, num_before), f"{slot.request_id}: block {block_id} was written over: {held}"
            if num_written > first:
                self._blocks[block_id] = (slot.stay, num_after)
