"""RMS norm, rotary embedding, and the chain that makes a window KV row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class RotaryRows:
    """Cosines and sines by position.

    Attributes:
        cos, sin: float32 [P, rope_dim / 2]; row p belongs to position p.
    """

    cos: torch.Tensor
    sin: torch.Tensor


class RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last axis: x [T, C], weight [C]."""
        ...


class Rotate(Protocol):
    def __call__(self, x: torch.Tensor, positions: torch.Tensor, rotary: RotaryRows) -> torch.Tensor:
        """Rotate neighbouring pairs of the last rope_dim channels: (a, b) -> (a cos - b sin, a sin + b cos).

        Args:
            x: [T, D] or [T, H, D].
            positions: int32 [T].

        Returns:
            A new tensor of the same shape.
        """
        ...


class WindowRows(Protocol):
    def __call__(
        self, kv: torch.Tensor, weight: torch.Tensor, eps: float, positions: torch.Tensor, rotary: RotaryRows, rounded: bool
    ) -> torch.Tensor:
        """Norm, rotate, and round to FP8 if `rounded`: kv [T, D] -> window KV rows [T, D]."""
        ...


class WriteRows(Protocol):
    def __call__(
        self, storage: torch.Tensor, dst: torch.Tensor, values: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        """storage[dst[i]] = values[rows[i]], or values[i] without `rows`. Writes `storage`.

        Args:
            storage: [S, D].
            dst: int32 [M], no index twice.
            values: [T, D].
            rows: int32 [M].
        """
        ...
