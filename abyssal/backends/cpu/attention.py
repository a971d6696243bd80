"""Sparse and block attention in plain torch. Contracts: `abyssal.ops.attention`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.batch import DraftBatch, ForwardBatch
from ...ops.norm_rope import RotaryRows
from .norm_rope import rotate_tail

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

GATHERED_ELEMENTS = 1 << 23
"""Gathered key elements held at a time."""


def attend_keys(q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Softmax attention of each row to its own keys: q [T, H, D], keys [T, N, D], valid [T, N], sink [H] -> [T, H, D]."""
    # absent keys may hold anything, also NaN, and must not reach the products
    keys = keys.masked_fill(~valid.unsqueeze(-1), 0.0)
    scores = torch.einsum("thd,tnd->thn", q, keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    peak = torch.maximum(scores.amax(-1, keepdim=True), sink.view(1, -1, 1))
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.view(1, -1, 1) - peak)
    return torch.einsum("thn,tnd->thd", weights, keys) / total


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    ring: torch.Tensor,
    entries: torch.Tensor | None,
    selected: torch.Tensor | None,
    sink: torch.Tensor,
    batch: ForwardBatch,
    window: int,
    rotary: RotaryRows,
    attend: Attend = attend_keys,
) -> torch.Tensor:
    num_rows, _, width = q.shape
    out = torch.empty_like(q)
    num_keys = window + (selected.shape[1] if selected is not None else 0)
    step = max(1, GATHERED_ELEMENTS // (num_keys * width))
    for begin in range(0, num_rows, step):
        rows = slice(begin, min(begin + step, num_rows))
        keys, valid = _window_keys(kv, ring, batch, rows, window)
        if selected is not None and entries is not None and selected.shape[1]:
            chosen = selected[rows].long()
            keys = torch.cat((keys, entries[chosen.clamp_min(0)]), 1)
            valid = torch.cat((valid, chosen >= 0), 1)
        out[rows] = attend(q[rows], keys, valid, sink)
    positions = batch.positions.long()
    return rotate_tail(out, rotary.cos[positions], -rotary.sin[positions])


def block_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    ring: torch.Tensor,
    sink: torch.Tensor,
    batch: DraftBatch,
    window: int,
    rotary: RotaryRows,
    attend: Attend = attend_keys,
) -> torch.Tensor:
    num_blocks, rows = len(batch.block_start), ring.shape[1]
    block_rows = len(q) // max(num_blocks, 1)
    before = batch.block_start.long().unsqueeze(1) + torch.arange(-window, 0)
    earlier = ring[batch.state_slot.long().unsqueeze(1), before.clamp_min(0) % rows]
    keys = torch.cat((earlier, kv.view(num_blocks, block_rows, -1)), 1)
    valid = torch.cat((before >= 0, torch.ones(num_blocks, block_rows, dtype=torch.bool)), 1)
    # one key set serves the whole block, so its rows are laid out as further heads
    queries = q.reshape(num_blocks, -1, q.shape[2])
    out = attend(queries, keys, valid, sink.repeat(block_rows)).view_as(q)
    positions = batch.positions.long()
    return rotate_tail(out, rotary.cos[positions], -rotary.sin[positions])


def _window_keys(
    kv: torch.Tensor, ring: torch.Tensor, batch: ForwardBatch, rows: slice, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [t, window, D] at positions p - window + 1 .. p of each row, and which of them exist."""
    row = torch.arange(rows.start, rows.stop)
    request = batch.row_to_request[rows].long()
    wanted = batch.positions[rows].long().unsqueeze(1) + torch.arange(1 - window, 1)
    back = batch.positions[rows].long().unsqueeze(1) - wanted
    source = row.unsqueeze(1) - back
    is_here = source >= batch.query_start[request].long().unsqueeze(1)
    slots = ring.shape[1]
    first = batch.window_start[request].long().unsqueeze(1)
    earlier = batch.state_slot[request].long().unsqueeze(1) * slots + wanted.clamp_min(0) % slots
    keys = torch.where(is_here.unsqueeze(-1), kv[source.clamp_min(0)], ring.flatten(0, 1)[earlier])
    return keys, wanted >= first
