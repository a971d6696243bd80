"""Group pooling in plain torch. Contract: `abyssal.ops.compressor`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.batch import CompressionPlan

Pool = Callable[[torch.Tensor], torch.Tensor]


def pool_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Pool groups of tokens [G, ratio, 2, D], values then gates, to [G, D]."""
    return (torch.softmax(tokens[:, :, 1], 1) * tokens[:, :, 0]).sum(1)


def pool_groups(
    values: torch.Tensor, gates: torch.Tensor, partial: torch.Tensor, plan: CompressionPlan, pool: Pool = pool_tokens
) -> torch.Tensor:
    rows = torch.stack((values, gates), 1)
    source = plan.source.long()
    here = rows[source.clamp_min(0)]
    earlier = partial[(-1 - source).clamp_min(0)]
    pooled = pool(torch.where((source >= 0)[..., None, None], here, earlier))
    partial[plan.partial.dst.long()] = rows[plan.partial.rows.long()]
    return pooled
