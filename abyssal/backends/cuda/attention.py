"""Sparse attention in Triton. Contract: `abyssal.ops.attention`.

One program serves one row and a group of heads. It goes over the row's window and then over its selected entries in blocks
of a fixed number of keys, in order, so that a row's bits do not depend on its batch: blocks of unused keys change nothing.
Products are float32 in three TF32 parts; the softmax is kept by its running maximum.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...core.batch import ForwardBatch
from ...ops.norm_rope import RotaryRows
from ..cpu.norm_rope import rotate_tail

BLOCK_KEYS = 16
HEADS = 16
"""Heads of a program. Three TF32 parts of more heads at 512 channels do not fit a processor's shared memory."""


@triton.jit
def _add_keys(q, keys, valid, best, total, out, scale, PRECISION: tl.constexpr):
    """One block of keys [N, D] into the running softmax of q [H, D]."""
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp(scores - new_best[:, None])
    shrink = tl.exp(best - new_best)
    total = total * shrink + tl.sum(weights, 1)
    out = out * shrink[:, None] + tl.dot(weights, keys, input_precision=PRECISION)
    return new_best, total, out


@triton.jit
def attend_rows(
    q_ptr,
    kv_ptr,
    ring_ptr,
    entries_ptr,
    selected_ptr,
    sink_ptr,
    positions_ptr,
    request_ptr,
    query_start_ptr,
    window_start_ptr,
    slot_ptr,
    out_ptr,
    scale,
    ring_rows,
    num_selected,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    channels = tl.arange(0, WIDTH)
    is_head = heads < NUM_HEADS
    place = (row * NUM_HEADS + heads)[:, None] * WIDTH + channels[None, :]
    q = tl.load(q_ptr + place, mask=is_head[:, None], other=0.0)
    request = tl.load(request_ptr + row)
    position = tl.load(positions_ptr + row)
    first_row = tl.load(query_start_ptr + request)
    window_start = tl.load(window_start_ptr + request)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    # the sink is a key without a value
    best = tl.load(sink_ptr + heads, mask=is_head, other=0.0)
    total = tl.full([GROUP], 1.0, tl.float32)
    out = tl.zeros([GROUP, WIDTH], tl.float32)
    for begin in range(0, WINDOW, KEYS):
        back = WINDOW - 1 - begin - tl.arange(0, KEYS)
        wanted = position - back
        valid = (back >= 0) & (wanted >= window_start)
        source = row - back
        is_here = valid & (source >= first_row)
        is_earlier = valid & (source < first_row)
        stored = slot * ring_rows + tl.where(is_earlier, wanted, 0) % ring_rows
        here = tl.load(kv_ptr + source[:, None] * WIDTH + channels[None, :], mask=is_here[:, None], other=0.0)
        earlier = tl.load(ring_ptr + stored[:, None] * WIDTH + channels[None, :], mask=is_earlier[:, None], other=0.0)
        best, total, out = _add_keys(q, here + earlier, valid, best, total, out, scale, PRECISION)
    for begin in range(0, num_selected, KEYS):
        index = begin + tl.arange(0, KEYS)
        entry = tl.load(selected_ptr + row * num_selected + index, mask=index < num_selected, other=-1).to(tl.int64)
        valid = entry >= 0
        keys = tl.load(entries_ptr + entry[:, None] * WIDTH + channels[None, :], mask=valid[:, None], other=0.0)
        best, total, out = _add_keys(q, keys, valid, best, total, out, scale, PRECISION)
    tl.store(out_ptr + place, out / total[:, None], mask=is_head[:, None])


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
) -> torch.Tensor:
    num_rows, num_heads, width = q.shape
    assert width & (width - 1) == 0, f"head width {width} is no power of two"
    out = torch.empty_like(q)
    num_selected = 0 if entries is None or selected is None else selected.shape[1]
    if num_rows:
        attend_rows[(num_rows, -(-num_heads // HEADS))](
            q.contiguous(),
            kv.contiguous(),
            ring,
            entries if num_selected else kv,
            selected.contiguous() if selected is not None and num_selected else batch.positions,
            sink,
            batch.positions,
            batch.row_to_request,
            batch.query_start,
            batch.window_start,
            batch.state_slot,
            out,
            width**-0.5,
            ring.shape[1],
            num_selected,
            NUM_HEADS=num_heads,
            WIDTH=width,
            WINDOW=window,
            GROUP=HEADS,
            KEYS=BLOCK_KEYS,
            PRECISION="tf32x3",
            num_warps=4,
            num_stages=1,
        )
    positions = batch.positions.long()
    return rotate_tail(out, rotary.cos[positions], -rotary.sin[positions])
