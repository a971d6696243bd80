"""MoE: routed experts picked by biased scores, weighed by unbiased ones, and a shared expert."""

from __future__ import annotations

import torch

from ..ops.moe import StoredExpert
from .common import ModelContext


class MoE:
    """`ffn.*` of one layer."""

    def __init__(self, ctx: ModelContext, prefix: str, num_experts: int, top_k: int) -> None:
        self._ctx, self._ops, self._top_k = ctx, ctx.ops, top_k
        self._gate = ctx.linear(f"{prefix}.gate")
        self._bias = ctx.weights.dense(f"{prefix}.gate.bias")
        routed = [self._stored(f"{prefix}.experts.{e}") for e in range(num_experts)]
        self._experts = ctx.ops.prepare_experts(routed, self._stored(f"{prefix}.shared_experts"), ctx.held_as)

    def _stored(self, prefix: str) -> StoredExpert:
        matrix = self._ctx.weights.matrix
        return StoredExpert(matrix(f"{prefix}.w1"), matrix(f"{prefix}.w3"), matrix(f"{prefix}.w2"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Output [T, C] for the normed rows x [T, C]."""
        config = self._ctx.config
        ids, weights = self._ops.route(x, self._gate, self._bias, self._top_k, config.routed_scaling_factor)
        return self._ops.experts(x, ids, weights, self._experts, config.swiglu_limit, self._ctx.numerics.activations)
