"""Matrices: how a backend holds them, and products with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from ..quant.formats import StoredMatrix

HeldAs = Literal["decoded", "packed"]


@dataclass(frozen=True)
class LinearWeight:
    """A matrix [out_features, in_features] as a backend holds it. `handle` belongs to the backend that made it."""

    out_features: int
    in_features: int
    handle: Any


class PrepareLinear(Protocol):
    def __call__(self, matrices: Sequence[StoredMatrix], held_as: HeldAs) -> LinearWeight:
        """Take matrices of equal input width over from a checkpoint, stacked along the output.

        `decoded` keeps float32 values in the backend's own layout; `packed` keeps the stored bytes (which may be mapped from
        a file) and decodes them at each use into bounded scratch. Both give the same products, bit for bit.
        """
        ...


class Linear(Protocol):
    def __call__(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """x [T, K] times weight [N, K] transposed: float32 [T, N]."""
        ...


class GroupedLinear(Protocol):
    def __call__(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """Block-diagonal product: x [T, G, K] with weight [G * R, K] gives [T, G * R]; group g uses rows g*R .. g*R+R-1."""
        ...
