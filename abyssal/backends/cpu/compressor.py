"""Group pooling in plain torch. Contract: `abyssal.ops.compressor`."""

from __future__ import annotations

import torch

from ...core.batch import CompressionPlan


def pool_groups(values: torch.Tensor, gates: torch.Tensor, partial: torch.Tensor, plan: CompressionPlan) -> torch.Tensor:
    rows = torch.stack((values, gates), 1)
    source = plan.source.long()
    here = rows[source.clamp_min(0)]
    earlier = partial[(-1 - source).clamp_min(0)]
    tokens = torch.where((source >= 0)[..., None, None], here, earlier)
    pooled = (torch.softmax(tokens[:, :, 1], 1) * tokens[:, :, 0]).sum(1)
    partial[plan.partial.dst.long()] = rows[plan.partial.rows.long()]
    return pooled
