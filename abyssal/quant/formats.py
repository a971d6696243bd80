"""Matrices as a checkpoint holds them.

    format     data                          scale                    value of element [n, k]
    fp8_tiles  uint8 [N, K], one e4m3        uint8 [N/32, K/32]       e4m3(data[n, k]) * 2^(scale[n/32, k/32] - 127)
    fp4_rows   uint8 [N, K/2], two e2m1      uint8 [N, K/32]          e2m1(half of data[n, k/2]) * 2^(scale[n, k/32] - 127)
    bf16       bfloat16 [N, K]               none                     itself
    f32        float32 [N, K]                none                     itself

Of two e2m1 codes in a byte, the even column has the low nibble. A scale byte of 255 is NaN, as is e4m3 127 (and 255).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

MatrixFormat = Literal["fp8_tiles", "fp4_rows", "bf16", "f32"]

SCALE_GROUP = 32
"""Input channels that share a scale; for FP8 tiles the output channels too."""


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """One matrix [out_features, in_features] in its stored format. The tensors may be read-only maps of a file.

    Attributes:
        name: checkpoint name without `.weight`.
        data: see the table above.
        scale: see the table above; None for bf16 and f32.
    """

    name: str
    format: MatrixFormat
    data: torch.Tensor
    scale: torch.Tensor | None
    out_features: int
    in_features: int

    def __post_init__(self) -> None:
        rows, columns = self.out_features, self.in_features
        data_shape, scale_shape, dtype = {
            "fp8_tiles": ((rows, columns), (rows // SCALE_GROUP, columns // SCALE_GROUP), torch.uint8),
            "fp4_rows": ((rows, columns // 2), (rows, columns // SCALE_GROUP), torch.uint8),
            "bf16": ((rows, columns), None, torch.bfloat16),
            "f32": ((rows, columns), None, torch.float32),
        }[self.format]
        have = (tuple(self.data.shape), None if self.scale is None else tuple(self.scale.shape), self.data.dtype)
        assert have == (data_shape, scale_shape, dtype), f"{self.name} [{rows}, {columns}] as {self.format}: got {have}"
        assert self.scale is None or self.scale.dtype == torch.uint8, f"{self.name}: scale bytes are {self.scale.dtype}"

    @property
    def num_bytes(self) -> int:
        """Bytes as stored, scales included."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def rows(self, start: int, stop: int) -> StoredMatrix:
        """Output rows `start .. stop - 1`, not copied. Both are multiples of 32 for FP8 tiles."""
        scale = self.scale
        if scale is not None and self.format == "fp8_tiles":
            assert start % SCALE_GROUP == stop % SCALE_GROUP == 0, f"{self.name}: rows {start}:{stop} cut a tile"
            scale = scale[start // SCALE_GROUP : stop // SCALE_GROUP]
        elif scale is not None:
            scale = scale[start:stop]
        return StoredMatrix(self.name, self.format, self.data[start:stop], scale, stop - start, self.in_features)
