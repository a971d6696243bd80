"""Sparse attention in Triton against the reference: on a card if there is one, in Triton's interpreter otherwise."""

from __future__ import annotations

import os

import pytest
import torch

from abyssal.backends.cpu.attention import sparse_attention as reference
from abyssal.core.batch import ForwardBatch, RingWrites
from abyssal.ops.norm_rope import RotaryRows

HAS_CARD = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CARD else "cpu"
if not HAS_CARD:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

WIDTH, RING = 32, 24


@pytest.fixture(scope="module")
def attend():
    from abyssal.backends.cuda.attention import sparse_attention

    return sparse_attention


def make_batch(starts: list[int], counts: list[int], window_start: list[int]) -> ForwardBatch:
    ints = {"dtype": torch.int32}
    positions = torch.cat([torch.arange(s, s + n, **ints) for s, n in zip(starts, counts, strict=True)])
    request = torch.repeat_interleave(torch.arange(len(starts), **ints), torch.tensor(counts))
    none = torch.zeros(0, **ints)
    return ForwardBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        row_to_request=request,
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], **ints),
        block_table=torch.zeros(len(starts), 1, **ints),
        state_slot=torch.tensor([2, 0, 1][: len(starts)], **ints),
        ngram_ids=torch.zeros(len(positions), 1, **ints),
        window=RingWrites(none, none),
        compression={},
        logit_rows=none,
        window_start=torch.tensor(window_start, **ints),
        max_context=int(positions.max()) + 1,
    )


CASES = [
    ([0], [5], [0], 4, 0),
    ([37], [1], [0], 4, 7),
    ([11, 40, 3], [3, 1, 9], [0, 30, 0], 4, 40),
    ([25, 0], [20, 2], [9, 0], 17, 16),
]


@pytest.mark.parametrize(("starts", "counts", "window_start", "heads", "num_selected"), CASES)
def test_against_reference(attend, starts, counts, window_start, heads, num_selected):
    from abyssal.backends.cuda.on_card import to_card

    draw = torch.Generator().manual_seed(len(starts) * 100 + heads)
    batch, window = make_batch(starts, counts, window_start), 20
    rows = len(batch.positions)
    q, kv = torch.randn(rows, heads, WIDTH, generator=draw), torch.randn(rows, WIDTH, generator=draw)
    ring, entries = torch.randn(3, RING, WIDTH, generator=draw), torch.randn(90, WIDTH, generator=draw)
    sink, angles = torch.randn(heads, generator=draw), torch.randn(64, 4, generator=draw)
    selected = torch.stack([torch.randperm(90, generator=draw)[:num_selected] for _ in range(rows)]).int()
    selected[0, num_selected // 2 :] = -1
    # what no row may read holds no number
    ring[batch.state_slot.long(), torch.tensor(starts) % RING] = torch.nan
    args = (
        q,
        kv,
        ring,
        entries,
        selected if num_selected else None,
        sink,
        batch,
        window,
        RotaryRows(angles.cos(), angles.sin()),
    )
    want = reference(*args)
    moved = [to_card(a) for a in args] if HAS_CARD else list(args)
    got = attend(*moved).cpu()
    assert want.isfinite().all()
    assert (got - want).norm() / want.norm() < 1e-5
