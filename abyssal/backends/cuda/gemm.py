"""Products with packed matrices: how a product is cut into tiles, and the call (see `csrc/gemm.cuh`)."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Literal

import torch

from .build import library
from .packing import CHUNK_BYTES, CHUNK_COLUMNS, PackedFormat, PackedMatrix

Epilogue = Literal["bf16", "f32", "swiglu"]
_EPILOGUES: dict[Epilogue, int] = {"bf16": 0, "f32": 1, "swiglu": 2}

PROCESSORS = 132
"""Of the cards there are kernels for; plans, not results, depend on it."""


@dataclass(frozen=True)
class TileShape:
    """A kernel's tile.

    Attributes:
        library: where it is compiled.
        index: its number there.
        chunks: of 64 weight rows.
        widths: tokens that there is code for, ascending.
        per_processor: blocks that run on a processor at once.
        step_clocks: what a step of 128 columns takes at least, whatever its size.
        one_width: every tile has the same width.
        takes_other: rows after the sorted ones may take an FP8 matrix.
    """

    library: str
    index: int
    chunks: int
    widths: tuple[int, ...]
    per_processor: int = 1
    step_clocks: int = 500
    one_width: bool = False
    takes_other: bool = False

    def width_for(self, tokens: int) -> int:
        """The narrowest width that holds `tokens`, or the widest."""
        return next((width for width in self.widths if width >= tokens), self.widths[-1])


_FEW_WIDTHS = (8, 16, 32, 64)
SHAPES: dict[PackedFormat, tuple[TileShape, ...]] = {
    "fp4": (
        TileShape("gemm_fp4", 0, 4, (8, 16, 32), takes_other=True),
        TileShape("gemm_fp4", 1, 8, (8, 16, 24, 32, 48, 64), takes_other=True),
        TileShape("gemm_fp4_large", 2, 4, (32, 64, 72, 80, 96, 104, 112, 120, 128, 136, 144)),
    ),
    "fp8": (
        TileShape("gemm_fp8", 0, 1, _FEW_WIDTHS, per_processor=3, step_clocks=350, one_width=True),
        TileShape("gemm_fp8", 1, 2, (64, 128)),
        TileShape("gemm_fp8", 2, 4, (32, 64, 96, 128)),
    ),
    "bf16": (
        TileShape("gemm_bf16", 0, 1, _FEW_WIDTHS, per_processor=3, step_clocks=250, one_width=True),
        TileShape("gemm_bf16", 1, 2, (64, 128)),
        TileShape("gemm_bf16", 2, 4, (32, 64, 96, 128)),
    ),
}

_BYTES_PER_CLOCK = 40
"""What a processor draws from the second-level cache."""
_STEP_OVERHEAD = 150
_TOKEN_BLOCK = 8


class GemmCall(ctypes.Structure):
    """Mirrors `GemmCall` in csrc/gemm.cuh, where the fields are described."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "out", "tiles", "num_tiles", "row_weight", "other_weight")),
        *((name, ctypes.c_int) for name in ("other_first", "other_rows", "other_tokens", "max_tiles", "x_rows", "x_groups")),
        *((name, ctypes.c_int) for name in ("columns", "groups", "chunk_rows", "steps")),
        *((name, ctypes.c_int) for name in ("out_rows", "out_stride", "tile_tokens", "token_block", "parts")),
        *((name, ctypes.c_int) for name in ("epilogue", "rounded", "shape")),
        ("limit", ctypes.c_float),
    )


@dataclass(frozen=True)
class Tiles:
    """Rows of a grouped product, sorted by group, cut into tiles on the card.

    Attributes:
        entries: int32 [most, 4]: group, first row, rows, 0.
        count: int32 [1].
        tokens: most rows of a tile.
        num_rows: how many rows are sorted; more may follow.
    """

    entries: torch.Tensor
    count: torch.Tensor
    tokens: int
    shape: TileShape
    num_rows: int


@dataclass(frozen=True)
class SwiGlu:
    """What follows the product of paired matrices: t = silu(min(a, limit)) clamp(b) weight, rounded to FP8 if asked."""

    limit: float
    rounded: bool
    row_weight: torch.Tensor | None = None


@functools.cache
def plan_dense(format: PackedFormat, chunk_rows: int, groups: int, rows: int) -> tuple[TileShape, int]:
    """Tile shape and tokens of a tile: `groups` products of chunk_rows chunks with `rows` rows. Does not change results."""
    plans = [(shape, width) for shape in SHAPES[format] for width in shape.widths]
    shape, width = min(plans, key=lambda plan: _clocks(format, chunk_rows, groups, rows, *plan))
    if shape.one_width:
        return shape, width
    tiles = -(-rows // width)
    return shape, -(-rows // (8 * tiles)) * 8


def _clocks(format: PackedFormat, chunk_rows: int, groups: int, rows: int, shape: TileShape, width: int) -> float:
    """Estimated clocks for a step of all tiles."""
    tiles = groups * -(-chunk_rows // shape.chunks) * -(-rows // width)
    multiply_clocks = shape.chunks * 8 * max(13, width / 2)
    feed_clocks = (shape.chunks * CHUNK_BYTES[format] + 2 * CHUNK_COLUMNS * width) / _BYTES_PER_CLOCK
    throughput = -(-tiles // PROCESSORS) * (max(multiply_clocks, feed_clocks) + (0 if shape.one_width else _STEP_OVERHEAD))
    latency = -(-tiles // (PROCESSORS * shape.per_processor)) * (shape.step_clocks + multiply_clocks / 2)
    return max(throughput, latency)


def multiply(
    weight: PackedMatrix,
    x: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    *,
    x_groups: int = 1,
    groups: int = 1,
    parts: int = 1,
    tiles: Tiles | None = None,
    swiglu: SwiGlu | None = None,
    other: PackedMatrix | None = None,
) -> None:
    """out = x times weight transposed, by the epilogue. An output is the same chain of products whatever the other rows are.

    Args:
        x: bf16 [T, x_groups * in_features], contiguous.
        out: written; bf16 [T, N], or float32 [parts, T, N].
        groups: without `tiles`, the rows of the matrix fall into so many groups, and group g takes part g of each row of x.
        other: an FP8 matrix of the same size for the rows of x after the sorted ones, where the tile shape `takes_other`.
        parts: float32 only: the input in this many parts, each with its own sum.
    """
    num_groups, chunk_rows, steps, _ = weight.chunks.shape
    if groups > 1:
        assert num_groups == 1, f"a matrix of {num_groups} groups cannot be cut into {groups}"
        assert chunk_rows % groups == 0, f"{chunk_rows} chunk rows do not fall into {groups} groups"
        num_groups, chunk_rows = groups, chunk_rows // groups
    if tiles:
        shape, tokens = tiles.shape, tiles.tokens
    else:
        shape, tokens = plan_dense(weight.format, chunk_rows, num_groups * parts, x.shape[0])
    call = GemmCall(
        weight=weight.chunks.data_ptr(),
        x=x.data_ptr(),
        out=out.data_ptr(),
        tiles=tiles.entries.data_ptr() if tiles else None,
        num_tiles=tiles.count.data_ptr() if tiles else None,
        row_weight=swiglu.row_weight.data_ptr() if swiglu and swiglu.row_weight is not None else None,
        other_weight=other.chunks.data_ptr() if other else None,
        other_first=tiles.num_rows if tiles else 0,
        other_rows=len(x) - tiles.num_rows if tiles else 0,
        other_tokens=shape.widths[-1],
        max_tiles=len(tiles.entries) if tiles else 0,
        x_rows=x.shape[0],
        x_groups=x_groups,
        columns=weight.in_features,
        groups=num_groups,
        chunk_rows=chunk_rows,
        steps=steps,
        out_rows=weight.out_features // groups,
        out_stride=out.shape[-1],
        tile_tokens=tokens,
        token_block=1 if tiles else _TOKEN_BLOCK,
        parts=parts,
        epilogue=_EPILOGUES[epilogue],
        rounded=bool(swiglu and swiglu.rounded),
        shape=shape.index,
        limit=swiglu.limit if swiglu else 0.0,
    )
    library(shape.library).call("gemm", ctypes.addressof(call))
