"""Routing and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..quant.formats import StoredMatrix
from .linear import HeldAs, LinearWeight


@dataclass(frozen=True)
class StoredExpert:
    """The three matrices of one expert: w1 (gate) and w3 (up) [I, C], w2 (down) [C, I]."""

    w1: StoredMatrix
    w3: StoredMatrix
    w2: StoredMatrix


@dataclass(frozen=True)
class ExpertWeights:
    """Routed experts 0 .. num_routed - 1 and one shared expert. `handle` belongs to the backend that made it."""

    num_routed: int
    hidden_size: int
    intermediate_size: int
    handle: Any


class PrepareExperts(Protocol):
    def __call__(self, routed: Sequence[StoredExpert], shared: StoredExpert, held_as: HeldAs) -> ExpertWeights:
        """Take the experts of one layer over from a checkpoint; see `PrepareLinear`."""
        ...


class Route(Protocol):
    def __call__(
        self, x: torch.Tensor, gate: LinearWeight, bias: torch.Tensor, top_k: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pick experts by sqrt(softplus(gate . x)) + bias, and weigh them without the bias.

        Args:
            x: [T, C].
            gate: [E, C].
            bias: [E].

        Returns:
            expert ids int32 [T, top_k], best first, lowest id first on ties; weights [T, top_k] that sum to `scale`
            (up to 1e-20 in the denominator).
        """
        ...


class Experts(Protocol):
    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, limit: float, rounded: bool
    ) -> torch.Tensor:
        """Sum over the picked experts, in the order of `ids`, then the shared one.

        Each expert: a = min(w1 x, limit), b = clamp(w3 x, -limit, limit), t = silu(a) b g with g its weight (1 for the
        shared), y = w2 t. With `rounded`, x and t are rounded to FP8 (see `RoundFp8`) before the products.

        Args:
            x: [T, C].
            ids: int32 [T, k].
            weights: [T, k].

        Returns:
            [T, C].
        """
        ...
