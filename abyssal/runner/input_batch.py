"""InputBatch: what a runner knows of each state slot, and the flat inputs of a step gathered from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..cache.spec import CacheSpec
from ..config.engine import BLOCK_TOKENS
from ..config.topology import Topology
from ..core.batch import CompressionPlan, ForwardBatch, RingWrites, SchedulerOutput, SlotAssignment

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class BatchGeometry:
    """Sizes that do not change from step to step.

    Attributes:
        window_ring: rows of a window ring.
        partial_ring: rows of a partial-group ring, by ratio.
    """

    num_slots: int
    max_model_len: int
    max_ngram: int
    window_ring: int
    partial_ring: dict[int, int]
    ratios: tuple[int, ...]

    @classmethod
    def of(cls, spec: CacheSpec, topology: Topology, num_slots: int, max_model_len: int, max_ngram: int) -> BatchGeometry:
        partial = {}
        for plan in topology.compressed_sources:
            if plan.owns_partial_group:
                partial[plan.ratio] = spec.group("partial_groups").rows_of(plan.layer_id)
        window = spec.group("window_kv").rows[0]
        return cls(num_slots, max_model_len, max_ngram, window, partial, topology.ratios)


class InputBatch:
    """Tokens and block tables by state slot (on the host), and `gather`."""

    def __init__(self, geometry: BatchGeometry) -> None:
        self._geometry = geometry
        # zeros are reserved, not touched: a long limit costs nothing until tokens arrive
        self._tokens: Ints = np.zeros((geometry.num_slots, geometry.max_model_len + 1), np.int32)
        self._num_tokens = np.zeros(geometry.num_slots, np.int64)
        self._tables: Ints = np.zeros((geometry.num_slots, -(-geometry.max_model_len // BLOCK_TOKENS) + 1), np.int32)

    def assign(self, assignment: SlotAssignment) -> None:
        """A request takes a slot with all its tokens so far."""
        slot, ids = assignment.state_slot, assignment.token_ids
        self._tokens[slot, : len(ids)] = ids
        self._num_tokens[slot] = len(ids)

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """The next tokens of the slot's sequence became known."""
        count = int(self._num_tokens[slot])
        self._tokens[slot, count : count + len(token_ids)] = token_ids
        self._num_tokens[slot] = count + len(token_ids)

    def num_tokens(self, slot: int) -> int:
        """Tokens known of the slot's sequence."""
        return int(self._num_tokens[slot])

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
            first = rows.first_new_block
            self._tables[rows.state_slot, first : first + len(rows.new_block_ids)] = rows.new_block_ids
        query_start = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        request = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        row = np.arange(query_start[-1], dtype=np.int32)
        positions = row - query_start[request] + starts[request]
        max_context = int((starts + counts).max(initial=0))
        tables = self._tables[slots, : -(-max_context // BLOCK_TOKENS)]
        layout = _Rows(row, request, positions, query_start, slots[request], tables)
        return ForwardBatch(
            token_ids=_tensor(self._tokens[layout.slots, positions]),
            positions=_tensor(positions),
            row_to_request=_tensor(request),
            query_start=_tensor(query_start),
            block_table=_tensor(tables),
            state_slot=_tensor(slots),
            ngram_ids=_tensor(self._ngrams(layout)),
            window=_ring_writes(layout, geometry.window_ring),
            compression={ratio: self._compression(layout, ratio) for ratio in geometry.ratios},
            logit_rows=_tensor(_logit_rows(step, query_start, all_logits)),
            max_context=max_context,
        )

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
    """Arrays over the T rows of a step, and two over its R requests."""

    row: Ints
    request: Ints
    positions: Ints
    query_start: Ints
    slots: Ints
    tables: Ints


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
