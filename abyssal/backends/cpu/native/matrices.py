"""Matrices as the native library holds them: float32 panels made once, or the stored bytes and where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....ops.linear import HeldAs
from ....quant.formats import StoredMatrix

PANEL = 16
"""Outputs of one panel."""

_FORMATS = {"fp8_tiles": 0, "fp4_rows": 1, "bf16": 2, "f32": 3}


class _Segment(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int64), ("format", ctypes.c_int64), ("data", ctypes.c_void_p), ("scale", ctypes.c_void_p))


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_int64),
        ("in_", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
    )


class MatrixArray:
    """Consecutive native matrices, each made of stored ones stacked along the output. Keeps alive what they point to.

    Attributes:
        address: of the first native matrix.
    """

    def __init__(
        self, stacks: Sequence[Sequence[StoredMatrix]], held_as: HeldAs, decode: Callable[[int, int], None]
    ) -> None:
        self._alive: list[Any] = []
        self._panels: list[torch.Tensor] = []
        self._array = (_Matrix * len(stacks))()
        self.address = ctypes.addressof(self._array)
        for index, matrices in enumerate(stacks):
            self._fill(self._array[index], matrices)
            if held_as == "decoded":
                self._decode(self._array[index], decode)
        if held_as == "decoded":
            self._drop_segments()

    def _fill(self, native: _Matrix, matrices: Sequence[StoredMatrix]) -> None:
        for matrix in matrices[:-1]:
            assert matrix.out_features % PANEL == 0, f"{matrix.name}: {matrix.out_features} outputs cannot be stacked on"
        width = matrices[0].in_features
        assert width % PANEL == 0, f"{matrices[0].name}: width {width} is no multiple of {PANEL}"
        segments = (_Segment * len(matrices))()
        for segment, matrix in zip(segments, matrices, strict=True):
            data = matrix.data.contiguous()
            scale = None if matrix.scale is None else matrix.scale.contiguous()
            segment.rows, segment.format = matrix.out_features, _FORMATS[matrix.format]
            segment.data, segment.scale = data.data_ptr(), None if scale is None else scale.data_ptr()
            self._alive += [data, scale]
        self._alive.append(segments)
        native.out, native.in_ = sum(m.out_features for m in matrices), width
        native.segments, native.num_segments = ctypes.addressof(segments), len(matrices)

    def _decode(self, native: _Matrix, decode: Callable[[int, int], None]) -> None:
        panels = torch.empty(-(-native.out // PANEL), native.in_, PANEL)
        decode(ctypes.addressof(native), panels.data_ptr())
        native.panels = panels.data_ptr()
        self._panels.append(panels)

    def _drop_segments(self) -> None:
        """Forget the stored bytes once all panels exist."""
        for native in self._array:
            native.segments, native.num_segments = None, 0
        self._alive.clear()
