"""Parameters by name, as the model asks for them, out of any source of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quant.convert import decode_rows_fp8
from ..quant.formats import MatrixFormat, StoredMatrix
from .source import RowReader, TensorSource

_FORMATS: dict[str, MatrixFormat] = {"F8_E4M3": "fp8_tiles", "I8": "fp4_rows", "BF16": "bf16", "F32": "f32"}


@dataclass(frozen=True)
class StoredEngramTable:
    """Rows of FP8 with one scale for 32 channels."""

    data: RowReader
    scale: RowReader

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Decoded rows: int64 [M] -> float32 [M, engram_head_dim]."""
        return decode_rows_fp8(self.data.gather(rows), self.scale.gather(rows))


class StoredWeights:
    """A checked source of tensors as the model sees it."""

    def __init__(self, source: TensorSource, *, engram_in_memory: bool = False) -> None:
        self._source = source
        self._engram_in_memory = engram_in_memory

    def matrix(self, name: str) -> StoredMatrix:
        """`<name>.weight` with its scale, as stored; or the tensor `name` itself if there is no such weight."""
        weight = f"{name}.weight" if f"{name}.weight" in self._source else name
        fmt = _FORMATS[self._source.spec(weight).dtype]
        data = self._source.tensor(weight)
        has_scale = fmt in ("fp8_tiles", "fp4_rows")
        columns = data.shape[1] * (2 if fmt == "fp4_rows" else 1)
        scale = self._source.tensor(f"{name}.scale") if has_scale else None
        return StoredMatrix(name, fmt, data, scale, data.shape[0], columns)

    def dense(self, name: str) -> torch.Tensor:
        """A tensor that has no scale, as a new float32 tensor; `name` is complete."""
        return self._source.tensor(name).to(torch.float32, copy=True)

    def engram_table(self, name: str) -> StoredEngramTable:
        """`<name>.weight` and its scales, row by row."""
        data, scale = self._source.rows(f"{name}.weight"), self._source.rows(f"{name}.scale")
        if self._engram_in_memory:
            return StoredEngramTable(data.in_memory(), scale.in_memory())
        return StoredEngramTable(data, scale)

    def release(self) -> None:
        """Let go of file pages that were read. What is mapped stays valid."""
        self._source.release()
