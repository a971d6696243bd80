"""The start-up test of `invariant`: whether a row's bits are the same alone, in a batch, and at another place of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..core.batch import ForwardBatch, RingWrites
from ..core.errors import UnsupportedOnBackend
from ..quant.formats import StoredMatrix
from .hyper_connection import HyperParams
from .moe import StoredExpert
from .norm_rope import RotaryRows
from .registry import OpTable

NUM_ROWS = 19
PARTS = ((0, 1), (18, 19), (3, 6), (1, 19))
"""Rows that are computed apart from the others: one, a few, and a batch less one."""
WIDTHS = (96, 320)
NUM_STREAMS, NUM_HEADS, WINDOW = 4, 4, 40

Rows = Callable[[int, int], tuple[torch.Tensor, ...]]
"""Results of an op for the rows from the first up to the last number."""


def require_invariance(table: OpTable, backend: str, device: str = "cpu") -> None:
    """Try the ops that add up along a row, at two widths, on a few sets of rows.

    Raises:
        UnsupportedOnBackend: naming the ops whose rows depend on the rows around them.
    """
    varying = varying_ops(table, device)
    if varying:
        raise UnsupportedOnBackend(
            f"invariant=True: on this machine backend={backend!r} gives a row other bits in other batches, in "
            f"{', '.join(varying)}. Use another backend, or invariant=False (--no-invariant) if output may change with what "
            "runs beside it"
        )


def varying_ops(table: OpTable, device: str = "cpu") -> list[str]:
    """Ops that were found to vary."""
    with torch.device(device):
        return _varying_ops(table)


def _varying_ops(table: OpTable) -> list[str]:
    varying: dict[str, None] = {}
    for width in WIDTHS:
        for name, rows in _candidates(table, width):
            whole = rows(0, NUM_ROWS)
            for begin, end in PARTS:
                same = all(torch.equal(own, all_[begin:end]) for own, all_ in zip(rows(begin, end), whole, strict=True))
                if not same:
                    varying[name] = None
    return list(varying)


def _candidates(table: OpTable, width: int) -> Iterator[tuple[str, Rows]]:
    draw = _Draw(width)
    x, weight = draw(NUM_ROWS, width), draw(width)
    matrix = table.prepare_linear([draw.matrix(48, width)], "decoded")
    yield "linear", lambda i, j: (table.linear(x[i:j], matrix),)
    yield "rms_norm", lambda i, j: (table.rms_norm(x[i:j], weight, 1e-6),)
    gate, bias = table.prepare_linear([draw.matrix(8, width)], "decoded"), draw(8)
    yield "route", lambda i, j: table.route(x[i:j], gate, bias, 2, 1.0)
    experts = [StoredExpert(draw.matrix(32, width), draw.matrix(32, width), draw.matrix(width, 32)) for _ in range(4)]
    held = table.prepare_experts(experts[:3], experts[3], "decoded")
    ids = torch.arange(2 * NUM_ROWS, dtype=torch.int32).view(NUM_ROWS, 2) % 3
    shares = draw(NUM_ROWS, 2).abs()
    yield "experts", lambda i, j: (table.experts(x[i:j], ids[i:j].contiguous(), shares[i:j].contiguous(), held, 7.0, True),)
    h, mix = draw(NUM_ROWS, NUM_STREAMS, width), (2 + NUM_STREAMS) * NUM_STREAMS
    fn = table.prepare_linear([draw.matrix(mix, NUM_STREAMS * width)], "decoded")
    base, scale, params = draw(mix), draw(3), HyperParams(NUM_STREAMS, 4, 1e-6, 1e-6)
    yield "hc_map", lambda i, j: table.hc_map(h[i:j], fn, base, scale, params)
    yield "sparse_attention", _attention(table, draw)


def _attention(table: OpTable, draw: _Draw) -> Rows:
    """Decoding rows of as many requests, each with a window of its own length behind it."""
    width = 64
    q, kv, ring = draw(NUM_ROWS, NUM_HEADS, width), draw(NUM_ROWS, width), draw(NUM_ROWS, WINDOW, width)
    sink, angles = draw(NUM_HEADS), draw(2 * NUM_ROWS, 8)
    rotary = RotaryRows(angles.cos(), angles.sin())

    def rows(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        batch = _decoding(torch.arange(begin, end, dtype=torch.int32))
        out = table.sparse_attention(q[begin:end], kv[begin:end], ring, None, None, sink, batch, WINDOW, rotary)
        return (out,)

    return rows


def _decoding(slots: torch.Tensor) -> ForwardBatch:
    """One row for each state slot, at a position of twice its number."""
    count, empty = len(slots), torch.zeros(0, dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.zeros_like(slots),
        positions=2 * slots,
        row_to_request=torch.arange(count, dtype=torch.int32),
        query_start=torch.arange(count + 1, dtype=torch.int32),
        block_table=torch.zeros(count, 1, dtype=torch.int32),
        state_slot=slots,
        ngram_ids=torch.zeros(count, 1, dtype=torch.int32),
        window=RingWrites(empty, empty),
        compression={},
        logit_rows=empty,
        window_start=torch.zeros_like(slots),
        max_context=2 * int(slots[-1]) + 1,
    )


class _Draw:
    """Random tensors that are the same on every run."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self._generator, device="cpu")
        return drawn.to(torch.get_default_device())

    def matrix(self, rows: int, columns: int) -> StoredMatrix:
        return StoredMatrix("start-up test", "f32", self(rows, columns).cpu() * 0.1, None, rows, columns)
