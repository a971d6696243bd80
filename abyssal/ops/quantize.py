"""Rounding to the number formats that the model was trained with. Values stay float32."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

ScaleFormat = Literal["ue8m0", "e4m3"]


class RoundFp8(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Round to E4M3 under one power-of-two scale for each 32 neighbours of the last axis.

        Used for linear inputs and window KV rows. amax is floored at 1e-4; the scale is 2^ceil(log2(amax / 448)) by the bit
        rule of the trained kernels: ((bits(amax * (1/448)) - 1) >> 23) + 1 - 127; nearest even, saturating at 448.

        Args:
            x: [..., K], K a multiple of 32.

        Returns:
            A new tensor of the same shape.
        """
        ...


class RoundFp4(Protocol):
    def __call__(self, x: torch.Tensor, group: int, scale: ScaleFormat) -> torch.Tensor:
        """Round to E2M1 under one scale for each `group` neighbours of the last axis.

        `e4m3` scales (compressed KV, group 16): amax is floored at 6 * 2^-9, multiplied by float32(1/6), capped at 448 and
        rounded to E4M3; x is multiplied by the float32 reciprocal of that. `ue8m0` scales (index rows, group 32): amax is
        floored at 6 * 2^-126, the scale is 2^ceil(log2(amax / 6)). Nearest, ties to the even code.

        Args:
            x: [..., K], K a multiple of `group`.

        Returns:
            A new tensor of the same shape.
        """
        ...
