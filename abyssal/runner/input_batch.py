"""InputBatch: what a runner knows of each state slot, and the flat inputs of a step gathered from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..cache.spec import CacheSpec
from ..config.engine import BLOCK_TOKENS
from ..config.model import TextConfig
from ..config.topology import Topology
from ..core.batch import CompressionPlan, ForwardBatch, RingWrites, ScheduledRows, SchedulerOutput, SlotAssignment, TailRows

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class BatchGeometry:
    """Sizes that do not change from step to step.

    Attributes:
        window: tokens of the sliding window.
        window_ring: rows of a window ring.
        replay_rows: rows of a prompt's end on which the decoder half runs; None for all.
        partial_ring: rows of a partial-group ring, by ratio.
    """

    num_slots: int
    max_model_len: int
    max_ngram: int
    window: int
    window_ring: int
    partial_ring: dict[int, int]
    ratios: tuple[int, ...]
    replay_rows: int | None = None

    @classmethod
    def of(
        cls,
        config: TextConfig,
        spec: CacheSpec,
        topology: Topology,
        num_slots: int,
        max_model_len: int,
        replay_rows: int | None = None,
    ) -> BatchGeometry:
        """The geometry of a model, for sequences of up to `max_model_len` tokens in `num_slots` slots."""
        partial = {}
        for plan in topology.compressed_sources:
            if plan.owns_partial_group:
                partial[plan.ratio] = spec.group("partial_groups").rows_of(plan.layer_id)
        return cls(
            num_slots=num_slots,
            max_model_len=max_model_len,
            max_ngram=config.engram_max_ngram_size,
            window=config.sliding_window,
            window_ring=spec.group("window_kv").rows[0],
            partial_ring=partial,
            ratios=topology.ratios,
            replay_rows=replay_rows,
        )


class InputBatch:
    """Tokens and block tables by state slot (on the host), and `gather`."""

    def __init__(self, geometry: BatchGeometry) -> None:
        self._geometry = geometry
        # zeros are reserved, not touched: a long limit costs nothing until tokens arrive
        spare = 1 + 2 * (geometry.window_ring - geometry.window)  # drafts behind the last token, also when measuring
        self._tokens: Ints = np.zeros((geometry.num_slots, geometry.max_model_len + spare), np.int32)
        self._num_tokens = np.zeros(geometry.num_slots, np.int64)
        self._num_blocks = np.zeros(geometry.num_slots, np.int64)
        self._replay_start: Ints = np.zeros(geometry.num_slots, np.int32)
        self._tables: Ints = np.zeros((geometry.num_slots, -(-geometry.max_model_len // BLOCK_TOKENS) + 1), np.int32)

    def assign(self, assignment: SlotAssignment, *, every_row: bool = False) -> None:
        """A request takes a slot with all its tokens so far.

        Args:
            every_row: the decoder half runs on all its rows, whatever the geometry says.
        """
        slot, ids = assignment.state_slot, assignment.token_ids
        self._tokens[slot, : len(ids)] = ids
        self._num_tokens[slot] = len(ids)
        self._num_blocks[slot] = 0
        replay = self._geometry.replay_rows
        self._replay_start[slot] = 0 if every_row or replay is None else max(0, len(ids) - replay)

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """The next tokens of the slot's sequence became known."""
        count = int(self._num_tokens[slot])
        self._tokens[slot, count : count + len(token_ids)] = token_ids
        self._num_tokens[slot] = count + len(token_ids)

    def num_tokens(self, slot: int) -> int:
        """Tokens known of the slot's sequence."""
        return int(self._num_tokens[slot])

    def num_reserved_tokens(self, rows: ScheduledRows) -> int:
        """Tokens for which the slot has room: those of its blocks, including these rows' new ones."""
        known = max(int(self._num_blocks[rows.state_slot]), rows.first_new_block + len(rows.new_block_ids))
        return min(known * BLOCK_TOKENS, self._geometry.max_model_len)

    def set_drafts(self, slot: int, token_ids: Sequence[int]) -> None:
        """Drafts stand behind the known tokens, where rows that verify them find them, until others are written there."""
        count = int(self._num_tokens[slot])
        self._tokens[slot, count : count + len(token_ids)] = token_ids

    def drafts(self, slot: int, num_drafts: int) -> tuple[int, ...]:
        """The first drafts of a slot."""
        count = int(self._num_tokens[slot])
        return tuple(self._tokens[slot, count : count + num_drafts].tolist())

    def next_ids(self, slot: int, start: int, num_rows: int) -> Ints:
        """Known tokens that follow each of the rows start .. start + num_rows - 1; fewer at the end of what is known."""
        stop = min(start + num_rows + 1, int(self._num_tokens[slot]))
        return self._tokens[slot, start + 1 : stop]

    def gather(self, step: SchedulerOutput, all_logits: frozenset[str]) -> ForwardBatch:
        """The flat inputs of a step.

        Args:
            all_logits: requests that want logits of every row; the others get them where rows sample: for the last known
                token and for drafts.
        """
        geometry = self._geometry
        slots = np.array([r.state_slot for r in step.rows], np.int32)
        starts = np.array([r.start for r in step.rows], np.int32)
        counts = np.array([r.num_rows for r in step.rows], np.int32)
        for rows in step.rows:
            if rows.new_block_ids:
                first, stop = rows.first_new_block, rows.first_new_block + len(rows.new_block_ids)
                self._tables[rows.state_slot, first:stop] = rows.new_block_ids
                self._num_blocks[rows.state_slot] = stop
        query_start = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        request = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        row = np.arange(query_start[-1], dtype=np.int32)
        positions = row - query_start[request] + starts[request]
        max_context = int((starts + counts).max(initial=0))
        tables = self._tables[slots, : -(-max_context // BLOCK_TOKENS)]
        layout = _Rows(row, request, positions, query_start, slots, tables, np.zeros_like(slots))
        compression = {ratio: self._compression(layout, ratio) for ratio in geometry.ratios}
        logit_rows = _logit_rows(step, query_start, all_logits)
        return self._batch(layout, compression, logit_rows, max_context, self._tail(layout, logit_rows, max_context))

    def _batch(
        self,
        rows: _Rows,
        compression: dict[int, CompressionPlan],
        logit_rows: Ints,
        max_context: int,
        tail: TailRows | None = None,
    ) -> ForwardBatch:
        return ForwardBatch(
            token_ids=_tensor(self._tokens[rows.slots, rows.positions]),
            positions=_tensor(rows.positions),
            row_to_request=_tensor(rows.request),
            query_start=_tensor(rows.query_start),
            block_table=_tensor(rows.tables),
            state_slot=_tensor(rows.slot_of_request),
            ngram_ids=_tensor(self._ngrams(rows)),
            window=_ring_writes(rows, self._geometry.window_ring),
            compression=compression,
            logit_rows=_tensor(logit_rows),
            window_start=_tensor(rows.window_start),
            max_context=max_context,
            tail=tail,
        )

    def _tail(self, rows: _Rows, logit_rows: Ints, max_context: int) -> TailRows | None:
        """The rows that the decoder half computes; None if those are all, and see their whole windows."""
        start = self._replay_start[rows.slot_of_request]
        behind = rows.positions - start[rows.request]
        if not start.any() or (behind >= self._geometry.window - 1).all():
            return None
        kept = rows.row[behind >= 0]
        place = np.cumsum(behind >= 0, dtype=np.int32) - 1
        counts = np.bincount(rows.request[kept], minlength=len(start))
        query_start = np.zeros(len(start) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        layout = _Rows(
            np.arange(len(kept), dtype=np.int32),
            rows.request[kept],
            rows.positions[kept],
            query_start,
            rows.slot_of_request,
            rows.tables,
            start,
        )
        return TailRows(_tensor(kept), self._batch(layout, {}, place[logit_rows], max_context))

    def _ngrams(self, rows: _Rows) -> Ints:
        back = rows.positions[:, None] - np.arange(self._geometry.max_ngram, dtype=np.int32)
        ids = self._tokens[rows.slots[:, None], np.maximum(back, 0)]
        return np.where(back < 0, np.int32(-1), ids)

    def _compression(self, rows: _Rows, ratio: int) -> CompressionPlan:
        ring = self._geometry.partial_ring.get(ratio, 1)
        last = rows.row[(rows.positions + 1) % ratio == 0]
        request, entry = rows.request[last], rows.positions[last] // ratio
        first = rows.positions[last] - (ratio - 1)
        offset = np.arange(ratio, dtype=np.int32)
        here = last[:, None] - (ratio - 1) + offset
        stored = rows.slots[last][:, None] * ring + (first[:, None] + offset) % ring
        source = np.where(here >= rows.query_start[request][:, None], here, -1 - stored)
        per_block = BLOCK_TOKENS // ratio
        dst = rows.tables[request, entry // per_block] * per_block + entry % per_block
        partial = _ring_writes(rows, ring) if ratio > 1 else RingWrites(_tensor(last[:0]), _tensor(last[:0]))
        return CompressionPlan(_tensor(source), _tensor(dst), _tensor(first), partial)


@dataclass(frozen=True)
class _Rows:
    """Arrays over the T rows of a step (row, request, positions) and over its R requests."""

    row: Ints
    request: Ints
    positions: Ints
    query_start: Ints
    slot_of_request: Ints
    tables: Ints
    window_start: Ints

    @property
    def slots(self) -> Ints:
        """State slot of each row."""
        return self.slot_of_request[self.request]


def _ring_writes(rows: _Rows, ring: int) -> RingWrites:
    """The last `ring` rows of each request; earlier ones would be overwritten at once."""
    kept = rows.row[rows.query_start[rows.request + 1] - rows.row <= ring]
    return RingWrites(_tensor(kept), _tensor(rows.slots[kept] * ring + rows.positions[kept] % ring))


def _logit_rows(step: SchedulerOutput, query_start: Ints, all_logits: frozenset[str]) -> Ints:
    wanted = []
    for i, rows in enumerate(step.rows):
        if rows.request_id in all_logits:
            wanted.append(np.arange(query_start[i], query_start[i + 1], dtype=np.int32))
        elif rows.samples:
            wanted.append(np.arange(query_start[i + 1] - rows.num_logit_rows, query_start[i + 1], dtype=np.int32))
    return np.concatenate(wanted) if wanted else np.zeros(0, np.int32)


def _tensor(array: npt.NDArray[np.signedinteger]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int32))
