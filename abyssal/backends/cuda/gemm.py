"""Products with packed matrices: how a product is cut into tiles, and the call (see `csrc/gemm.cuh`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch

from .build import library
from .packing import PackedMatrix

Epilogue = Literal["bf16", "f32", "swiglu"]
_EPILOGUES: dict[Epilogue, int] = {"bf16": 0, "f32": 1, "swiglu": 2}

FEW, MANY_GROUPS, LARGE = 0, 1, 2
"""Shapes of a tile. FEW: 64 weight rows by up to 64 tokens, three to a processor. MANY_GROUPS (FP4): 256 by up to 64.
LARGE: 256 by up to 144 (FP4) or 128."""

_PROCESSORS = 132
_DENSE_TOKENS = 128
_FEW_WIDTHS = (8, 16, 32, 64)
_TOKEN_BLOCK = 8


class GemmCall(ctypes.Structure):
    """Mirrors `GemmCall` in csrc/gemm.cuh, where the fields are described."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "out", "tiles", "num_tiles", "row_weight")),
        *((name, ctypes.c_int) for name in ("max_tiles", "x_rows", "x_groups", "columns", "groups", "chunk_rows", "steps")),
        *((name, ctypes.c_int) for name in ("out_rows", "out_stride", "tile_tokens", "token_block", "parts")),
        *((name, ctypes.c_int) for name in ("epilogue", "rounded", "read_once", "shape")),
        ("limit", ctypes.c_float),
    )


@dataclass(frozen=True)
class Tiles:
    """Rows of a grouped product, sorted by group, cut into tiles on the card.

    Attributes:
        entries: int32 [most, 4]: group, first row, rows, 0.
        count: int32 [1].
        tokens: most rows of a tile.
        shape: see `FEW`.
    """

    entries: torch.Tensor
    count: torch.Tensor
    tokens: int
    shape: int


@dataclass(frozen=True)
class SwiGlu:
    """What follows the product of paired matrices: t = silu(min(a, limit)) clamp(b) weight, rounded to FP8 if asked."""

    limit: float
    rounded: bool
    row_weight: torch.Tensor | None = None


def plan_dense(weight: PackedMatrix, rows: int, groups: int) -> tuple[int, int]:
    """Tile shape and tokens of a tile for `rows` rows in every group. The choice does not change results."""
    chunks = weight.chunks.shape[0] * weight.chunks.shape[1]
    if rows > _FEW_WIDTHS[-1]:
        tiles = -(-rows // _DENSE_TOKENS)
        if tiles * -(-chunks // 4) >= _PROCESSORS // 2:
            return LARGE, -(-rows // (16 * tiles)) * 16
    return FEW, width_for(rows)


def width_for(rows: int) -> int:
    """Tokens of the narrowest tile for few tokens that holds `rows`, or of the widest."""
    return next((width for width in _FEW_WIDTHS if width >= rows), _FEW_WIDTHS[-1])


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
) -> None:
    """out = x times weight transposed, by the epilogue. An output is the same chain of products whatever the other rows are.

    Args:
        x: bf16 [T, x_groups * in_features], contiguous.
        out: written; bf16 [T, N], or float32 [parts, T, N].
        groups: without `tiles`, the rows of the matrix fall into so many groups, and group g takes part g of each row of x.
        parts: float32 only: the input in this many parts, each with its own sum.
    """
    num_groups, chunk_rows, steps, _ = weight.chunks.shape
    if groups > 1:
        assert num_groups == 1, f"a matrix of {num_groups} groups cannot be cut into {groups}"
        assert chunk_rows % groups == 0, f"{chunk_rows} chunk rows do not fall into {groups} groups"
        num_groups, chunk_rows = groups, chunk_rows // groups
    shape, tokens = (tiles.shape, tiles.tokens) if tiles else plan_dense(weight, x.shape[0], groups)
    call = GemmCall(
        weight=weight.chunks.data_ptr(),
        x=x.data_ptr(),
        out=out.data_ptr(),
        tiles=tiles.entries.data_ptr() if tiles else None,
        num_tiles=tiles.count.data_ptr() if tiles else None,
        row_weight=swiglu.row_weight.data_ptr() if swiglu and swiglu.row_weight is not None else None,
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
        read_once=shape != LARGE,
        shape=shape,
        limit=swiglu.limit if swiglu else 0.0,
    )
    library(f"gemm_{weight.format}").call("gemm", ctypes.addressof(call))
