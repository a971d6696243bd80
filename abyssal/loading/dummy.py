"""Random weights from a configuration alone, made when asked for. For speed and memory tests: the output means nothing.

Each tensor is a function of its name and the seed, so that the order of loading does not matter. Engram rows are a hash of
their index, so that a table of any size takes no memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..config.model import ModelConfig
from .names import expected_tensors
from .random_values import draw_stored
from .source import TensorEntry, TensorRows

_MIX = 0x9E3779B97F4A7C15
_ROUNDS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

TABLE_SCALE_BYTES = (117, 118)
"""Scale bytes of Engram rows. Uniform e4m3 bytes have a root mean square near 100; these bring it to about 0.15."""


class DummyCheckpoint:
    """Tensors that a checkpoint of this configuration would have, at random. Implements `TensorSource`."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._specs = expected_tensors(config)
        self._seed = seed
        self._drawn_scale: tuple[str, torch.Tensor | None] = ("", None)

    def names(self) -> Iterable[str]:
        return self._specs.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def spec(self, name: str) -> TensorEntry:
        spec = self._specs[name]
        return TensorEntry(spec.dtypes[0], spec.shape, "", 0, spec.num_bytes)

    def tensor(self, name: str) -> torch.Tensor:
        """Drawn anew at each call, except for the scale of the weight drawn last."""
        spec = self._specs[name]
        if spec.kind.startswith("engram_table"):
            return self.rows(name).in_memory().data
        if name.endswith(".scale"):
            weight = name.removesuffix(".scale") + ".weight"
            if self._drawn_scale[0] != weight:
                self.tensor(weight)
            scale = self._drawn_scale[1]
            assert scale is not None, f"{weight} has no scale"
            return scale
        generator = torch.Generator().manual_seed(_seed_of(name, self._seed))
        data, scale = draw_stored(name, spec.dtypes[0], spec.shape, generator)
        self._drawn_scale = (name, scale)
        return data

    def rows(self, name: str) -> HashedRows:
        count, width = self._specs[name].shape
        return HashedRows(count, width, _seed_of(name, self._seed), is_scale=name.endswith(".scale"))

    def release(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class HashedRows:
    """Rows of bytes that are a hash of (seed, row, column)."""

    count: int
    width: int
    seed: int
    is_scale: bool

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        words = -(-self.width // 8)
        counter = (rows[:, None] * words + torch.arange(words)).numpy().astype(np.uint64)
        hashed = _mix(counter * np.uint64(_MIX) + np.uint64(self.seed))
        data = torch.from_numpy(hashed.view(np.uint8)[:, : self.width].copy())
        if self.is_scale:
            low, high = TABLE_SCALE_BYTES
            return data % (high - low + 1) + low
        return torch.where((data & 127) == 127, data & 128, data)  # 127 is NaN

    def in_memory(self) -> TensorRows:
        """The same rows, all of them: as large as the real table."""
        table = torch.empty(self.count, self.width, dtype=torch.uint8)
        step = 1 << 16
        for start in range(0, self.count, step):
            stop = min(start + step, self.count)
            table[start:stop] = self.gather(torch.arange(start, stop))
        return TensorRows(table)


def _seed_of(name: str, seed: int) -> int:
    """A number that differs for each tensor name, the same on every machine."""
    return zlib.crc32(name.encode()) << 31 ^ seed


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators)."""
    for shift, factor in zip((30, 27), _ROUNDS, strict=True):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))
