"""Packed cache rows: the form in which storage tiers and transfers hold what a sequence leaves behind.

    row          element  scale for  scale format  bytes of `dim` channels
    window       e4m3     32         ue8m0         dim + dim/32
    compressed   e2m1     16         e4m3          dim/2 + dim/16
    index        e2m1     32         ue8m0         dim/2 + dim/32

A row is its element bytes, then its scale bytes. Packing takes values that already lie on such a grid (the rounding is an
op) and finds scales that express them exactly, so that unpacking returns the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .convert import (
    E2M1_MAGNITUDES,
    E2M1_MAX,
    E4M3_MAX,
    decode_scales,
    e2m1_codes,
    e2m1_pair_table,
    e4m3_table,
    exponent_for,
    pack_nibbles,
)


@dataclass(frozen=True)
class CacheRowFormat:
    """The packed form of rows of one cache group.

    Attributes:
        dim: channels of a row.
        group: channels that share one scale byte.
    """

    name: str
    dim: int
    element: Literal["e4m3", "e2m1"]
    group: int
    scale: Literal["ue8m0", "e4m3"]

    def __post_init__(self) -> None:
        assert self.dim % self.group == 0, f"{self.name}: {self.dim} channels are no multiple of the group {self.group}"
        assert (self.element, self.scale) != ("e4m3", "e4m3"), f"{self.name}: no such format"

    @property
    def data_bytes(self) -> int:
        return self.dim if self.element == "e4m3" else self.dim // 2

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.dim // self.group

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """float32 [.., dim] on the format's grid to uint8 [.., row_bytes].

        Raises:
            ValueError: if a value is not on the grid, so that it would change.
        """
        groups = values.reshape(-1, self.dim // self.group, self.group)
        scale = _power_scales(groups, self._limit) if self.scale == "ue8m0" else _e4m3_scales(groups)
        # float64, where the quotient of two values of so few digits is exact
        scaled = (groups.double() / self._scale_values(scale).double().unsqueeze(-1)).float().flatten(1)
        if self.element == "e4m3":
            data = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            data = pack_nibbles(e2m1_codes(scaled, torch.tensor(E2M1_MAGNITUDES[:-1])))
        packed = torch.cat((data, scale), 1).view(*values.shape[:-1], self.row_bytes)
        if not torch.equal(self.unpack(packed), values):
            raise ValueError(
                f"{self.name} rows hold values that were not rounded to {self.element}, so they cannot be packed"
            )
        return packed

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """uint8 [.., row_bytes] to float32 [.., dim]."""
        flat = packed.reshape(-1, self.row_bytes)
        data, scale = flat[:, : self.data_bytes], flat[:, self.data_bytes :]
        table = e4m3_table() if self.element == "e4m3" else e2m1_pair_table()
        values = table[data.to(torch.int32)].view(len(flat), -1, self.group)
        return (values * self._scale_values(scale).unsqueeze(-1)).view(*packed.shape[:-1], self.dim)

    @property
    def _limit(self) -> float:
        return E4M3_MAX if self.element == "e4m3" else E2M1_MAX

    def _scale_values(self, scale: torch.Tensor) -> torch.Tensor:
        return decode_scales(scale) if self.scale == "ue8m0" else e4m3_table()[scale.to(torch.int32)]


def _power_scales(groups: torch.Tensor, limit: float) -> torch.Tensor:
    """Least power-of-two scale of each group: bytes [R, groups].

    Multiples of a larger power of two are multiples of a smaller one, so the least that does not overflow is exact whichever
    was used in rounding.
    """
    return (exponent_for(groups.abs().amax(-1), limit) + 127).to(torch.uint8)


def _e4m3_scales(groups: torch.Tensor) -> torch.Tensor:
    """For each group of FP4 values an e4m3 scale that divides all of them into e2m1 values: bytes [R, groups].

    The greatest value is one of the seven e2m1 magnitudes times the scale. They are tried from the greatest down, and the
    first that leaves every value exact is taken.
    """
    magnitudes = groups.abs().double()
    amax = magnitudes.amax(-1)
    chosen = torch.ones(amax.shape, dtype=torch.uint8)  # the smallest scale, for groups of zeros
    open_groups = amax > 0
    allowed = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)
    for divisor in E2M1_MAGNITUDES[:0:-1]:
        scale = (amax / divisor).clamp_max(E4M3_MAX).float().to(torch.float8_e4m3fn)
        exact = scale.double()
        fits = torch.isin(magnitudes / exact.unsqueeze(-1), allowed).all(-1) & open_groups
        chosen = torch.where(fits, scale.view(torch.uint8), chosen)
        open_groups = open_groups & ~fits
    return chosen


def window_rows(head_dim: int) -> CacheRowFormat:
    """Rows of window KV."""
    return CacheRowFormat("window_kv", head_dim, "e4m3", 32, "ue8m0")


def compressed_rows(head_dim: int) -> CacheRowFormat:
    """Rows of compressed KV."""
    return CacheRowFormat("compressed_kv", head_dim, "e2m1", 16, "e4m3")


def index_rows(index_head_dim: int) -> CacheRowFormat:
    """Rows of index keys."""
    return CacheRowFormat("index_keys", index_head_dim, "e2m1", 32, "ue8m0")
