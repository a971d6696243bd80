"""Which compressed entries a query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..core.batch import ForwardBatch


@dataclass(frozen=True)
class SelectionRule:
    """How entries are selected at one layer.

    Attributes:
        ratio: tokens for each entry; entry g is visible at position p iff g < (p + 1) // ratio.
        entries_per_block: entries of one source in a cache block.
        topk: entries kept for a query.
        block_size: entries of a candidate block.
        topk_blocks: candidate blocks kept for a query.
        publishes: also report the candidate blocks.
    """

    ratio: int
    entries_per_block: int
    topk: int
    block_size: int
    topk_blocks: int
    publishes: bool


@dataclass(frozen=True)
class Selection:
    """Selected entries of each row.

    Attributes:
        entries: int32 [T, K] flat cache indices (block id * entries_per_block + offset) in ascending order of the entry,
            then -1; K is at most topk and may be 0.
        blocks: int32 [T, B] candidate blocks in ascending order, then -1; None unless published.
    """

    entries: torch.Tensor
    blocks: torch.Tensor | None


class SelectEntries(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        batch: ForwardBatch,
        rule: SelectionRule,
        candidates: torch.Tensor | None,
    ) -> Selection:
        """Keep the best visible entries of each row by score[g] = sum_h weights[h] relu(q[h] . keys[g]).

        A candidate block's score is the best of its visible members; the last block with a visible entry is always kept.
        With `candidates`, only entries inside those blocks are scored. Rows with no more than topk eligible entries keep
        all.

        Args:
            q: [T, H, D].
            weights: [T, H].
            keys: [entries of all cache blocks, D].
            candidates: int32 [T, B] as published, or None.
        """
        ...
