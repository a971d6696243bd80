"""Pooling of token groups into compressed latents."""

from __future__ import annotations

from typing import Protocol

import torch

from ..core.batch import CompressionPlan


class PoolGroups(Protocol):
    def __call__(
        self, values: torch.Tensor, gates: torch.Tensor, partial: torch.Tensor, plan: CompressionPlan
    ) -> torch.Tensor:
        """Pool each group completed in this step, then keep the rows that a later step may need.

        pooled[g] = sum_i w_i values_i with w the softmax over the group's gates, channel by channel. Groups lie at absolute
        positions: tokens ratio * g .. ratio * g + ratio - 1. Tokens of earlier steps come from `partial`, which is written
        last: partial[plan.partial.dst] = (values, gates)[plan.partial.rows].

        Args:
            values: [T, D].
            gates: [T, D].
            partial: [S, 2, D], values then gates.

        Returns:
            [G, D].
        """
        ...
