"""Selection of compressed entries in plain torch. Contract: `abyssal.ops.indexer`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.batch import ForwardBatch
from ...ops.indexer import Selection, SelectionRule

Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SCORE_ELEMENTS = 1 << 22
"""Scores held at a time; bounds the scratch of a long prompt."""


def score_keys(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """sum_h weights[t, h] relu(q[t, h] . keys[n]): q [T, H, D], weights [T, H], keys [N, D] -> [T, N]."""
    return torch.einsum("thn,th->tn", torch.einsum("thd,nd->thn", q, keys).relu_(), weights)


def select_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    batch: ForwardBatch,
    rule: SelectionRule,
    candidates: torch.Tensor | None,
    score_of: Score = score_keys,
) -> Selection:
    num_rows = q.shape[0]
    most = batch.max_context // rule.ratio
    width = min(rule.topk, most)
    num_blocks = min(rule.topk_blocks, -(-most // rule.block_size))
    entries = torch.full((num_rows, width), -1, dtype=torch.int32)
    blocks = torch.full((num_rows, num_blocks), -1, dtype=torch.int32) if rule.publishes else None
    if not width:
        return Selection(entries, blocks)
    starts = batch.query_start.tolist()
    for r in range(len(starts) - 1):
        last = int(batch.positions[starts[r + 1] - 1]) if starts[r + 1] > starts[r] else -1
        flat = _flat_entries(batch.block_table[r], (last + 1) // rule.ratio, rule.entries_per_block)
        if not len(flat):
            continue
        step = max(1, SCORE_ELEMENTS // (len(flat) * q.shape[1]))
        for begin in range(starts[r], starts[r + 1], step):
            rows = slice(begin, min(begin + step, starts[r + 1]))
            score = score_of(q[rows], weights[rows], keys[flat])
            visible = ((batch.positions[rows] + 1) // rule.ratio).unsqueeze(1)
            score = score.masked_fill(torch.arange(len(flat)) >= visible, -torch.inf)
            if candidates is not None:
                score = score.masked_fill(~_inside(candidates[rows], len(flat), rule.block_size), -torch.inf)
            entries[rows, : min(width, len(flat))] = _best(score, width, flat)
            if blocks is not None:
                best = _best_blocks(score, visible.squeeze(1), rule)
                blocks[rows, : best.shape[1]] = best
    return Selection(entries, blocks)


def _flat_entries(table: torch.Tensor, count: int, per_block: int) -> torch.Tensor:
    """Flat cache index of a request's entries 0 .. count - 1."""
    entry = torch.arange(count)
    return table[entry // per_block].long() * per_block + entry % per_block


def _inside(candidates: torch.Tensor, count: int, block_size: int) -> torch.Tensor:
    """bool [T, count]: does the entry lie in one of the row's candidate blocks."""
    num_blocks = -(-count // block_size)
    kept = torch.zeros(candidates.shape[0], num_blocks + 1, dtype=torch.bool)
    # unused slots (-1) and blocks beyond this request go to a column that is dropped
    target = torch.where(candidates < 0, num_blocks, candidates).clamp_max(num_blocks).long()
    kept.scatter_(1, target, True)
    return kept[:, :-1].repeat_interleave(block_size, 1)[:, :count]


def _ascending_best(score: torch.Tensor, width: int) -> torch.Tensor:
    """Indices of the best finite scores, ascending, then -1: int64 [T, min(width, n)]. Ties keep the lowest index."""
    count = score.shape[1]
    best, index = torch.sort(score, dim=1, descending=True, stable=True)
    index = index[:, :width].masked_fill(best[:, :width] == -torch.inf, count)
    index = index.sort(1).values
    return index.masked_fill(index == count, -1)


def _best(score: torch.Tensor, width: int, flat: torch.Tensor) -> torch.Tensor:
    index = _ascending_best(score, width)
    return torch.where(index < 0, -1, flat[index.clamp_min(0)]).to(torch.int32)


def _best_blocks(score: torch.Tensor, visible: torch.Tensor, rule: SelectionRule) -> torch.Tensor:
    """int32 [T, B] candidate blocks of rows that see `visible` [T] entries."""
    size = rule.block_size
    padding = -score.shape[1] % size
    padded = torch.nn.functional.pad(score, (0, padding), value=-torch.inf)
    best = padded.unflatten(1, (-1, size)).amax(2)
    last = (visible - 1).div(size, rounding_mode="floor").long().unsqueeze(1)
    newest = best.scatter(1, last.clamp_min(0), torch.inf)
    best = torch.where(last >= 0, newest, best)
    return _ascending_best(best, rule.topk_blocks).to(torch.int32)
