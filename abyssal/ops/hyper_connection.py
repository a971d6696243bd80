"""Manifold-constrained hyper-connections: n residual streams mixed by a doubly stochastic matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .linear import LinearWeight


@dataclass(frozen=True)
class HyperParams:
    """Constants of the mapping: stream count, Sinkhorn iterations, its epsilon, and the norm's."""

    num_streams: int
    sinkhorn_iters: int
    eps: float
    norm_eps: float


class HcMap(Protocol):
    def __call__(
        self, h: torch.Tensor, fn: LinearWeight, base: torch.Tensor, scale: torch.Tensor, params: HyperParams
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mixing weights of one site from the residual streams.

        m = (fn . v) * rsqrt(mean(v^2) + norm_eps) with v the n streams laid end to end; then
        pre = sigmoid(m[:n] scale0 + base) + eps; post = 2 sigmoid(m[n:2n] scale1 + base);
        comb = Sinkhorn(softmax over the last axis of m[2n:] scale2 + base, then + eps), columns normalised first.

        Args:
            h: [T, n, C].
            fn: [(2 + n) n, n C].
            base: [(2 + n) n].
            scale: [3].

        Returns:
            pre [T, n], post [T, n], comb [T, n, n].
        """
        ...


class HcCollapse(Protocol):
    def __call__(self, h: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of sum_j pre[j] h[j]: h [T, n, C], pre [T, n], weight [C] -> [T, C]."""
        ...


class HcExpand(Protocol):
    def __call__(self, y: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """h'[k] = post[k] y + sum_j comb[j, k] h[j]: y [T, C], h [T, n, C] -> a new [T, n, C]."""
        ...
