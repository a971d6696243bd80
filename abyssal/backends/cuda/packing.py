"""Matrices in the layout that the kernels stream: chunks of 64 rows x 128 columns (see `csrc/formats.cuh`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...core.errors import CheckpointError
from ...quant.formats import StoredMatrix
from .build import library

PackedFormat = Literal["fp4", "fp8", "bf16"]

CHUNK_ROWS, CHUNK_COLUMNS = 64, 128
CHUNK_BYTES: dict[PackedFormat, int] = {"fp4": 4096 + 256, "fp8": 8192 + 16, "bf16": 16384}
_FORMATS: dict[str, tuple[PackedFormat, int]] = {"fp4_rows": ("fp4", 0), "fp8_tiles": ("fp8", 1), "bf16": ("bf16", 2)}


@dataclass(frozen=True)
class PackedMatrix:
    """Equal matrices [out_features, in_features] on the card, packed.

    Attributes:
        chunks: uint8 [groups, chunk rows, steps, bytes of a chunk].
        out_features: rows of one of them. Of paired ones (gate and up projection), rows of each half.
        paired: rows 0..7 of each 16 are gate channels, rows 8..15 the up projections of the same.
    """

    format: PackedFormat
    chunks: torch.Tensor
    out_features: int
    in_features: int
    paired: bool = False

    @property
    def num_bytes(self) -> int:
        return self.chunks.nbytes


def empty_packed(
    format: PackedFormat, groups: int, out_features: int, in_features: int, paired: bool = False
) -> PackedMatrix:
    """Room for `groups` matrices, not initialised."""
    rows = out_features * (2 if paired else 1)
    shape = (groups, -(-rows // CHUNK_ROWS), -(-in_features // CHUNK_COLUMNS), CHUNK_BYTES[format])
    return PackedMatrix(format, torch.empty(shape, dtype=torch.uint8, device="cuda"), out_features, in_features, paired)


def packed_format(matrix: StoredMatrix) -> PackedFormat:
    return _FORMATS[matrix.format][0]


def pack_into(
    packed: PackedMatrix, group: int, first: Sequence[StoredMatrix], second: StoredMatrix | None, flag: torch.Tensor
) -> None:
    """Pack `first`, stacked along the output, or `first` paired with `second`, as matrix `group`.

    Args:
        flag: int32 [1] on the card; set to 1 if a scale is too large. `check_scales` reads it.
    """
    matrices = [_on_card(first), _on_card([second] if second else [])]
    (data0, scale0), (data1, scale1) = matrices
    out = packed.chunks[group]
    library("repack").call(
        "repack",
        _address(data0),
        _address(scale0),
        _address(data1),
        _address(scale1),
        sum(m.out_features for m in first),
        packed.in_features,
        _FORMATS[first[0].format][1],
        out.data_ptr(),
        out.shape[0],
        out.shape[1],
        flag.data_ptr(),
    )


def check_scales(flag: torch.Tensor, name: str) -> None:
    """Raises CheckpointError if packing met a scale that the kernels cannot apply."""
    if flag.item():
        raise CheckpointError(f"{name}: a block scale is above 2^65 or not a number; no working checkpoint has such scales")


def pack(matrices: Sequence[StoredMatrix]) -> PackedMatrix:
    """Matrices of one format and input width, stacked along the output.

    Raises:
        CheckpointError: for a scale above 2^65 or NaN.
    """
    formats = {m.format for m in matrices}
    assert len(formats) == 1, f"{matrices[0].name}: cannot stack formats {sorted(formats)}"
    packed = empty_packed(packed_format(matrices[0]), 1, sum(m.out_features for m in matrices), matrices[0].in_features)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    pack_into(packed, 0, matrices, None, flag)
    check_scales(flag, matrices[0].name)
    return packed


def _on_card(matrices: Sequence[StoredMatrix]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not matrices:
        return None, None
    data = torch.cat([m.data.to("cuda") for m in matrices])
    scales = [m.scale.to("cuda") for m in matrices if m.scale is not None]
    return data, torch.cat(scales) if scales else None


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
