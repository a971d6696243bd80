"""Compressor: turns each group of `ratio` tokens into one KV entry and one index key, in the paged cache."""

from __future__ import annotations

import torch

from ..config.topology import LayerPlan
from .common import ModelContext, RotaryTable, StepState

COMPRESSED_GROUP = 16
INDEX_GROUP = 32


class Compressor:
    """`attn.compressor.*` and the key side of `attn.indexer.*` of a layer that owns compressed KV."""

    def __init__(self, ctx: ModelContext, prefix: str, plan: LayerPlan, rotary: RotaryTable) -> None:
        self._ctx, self._ops, self._plan, self._rotary = ctx, ctx.ops, plan, rotary
        self._eps = ctx.config.rms_norm_eps
        self._wkv = ctx.linear(f"{prefix}.compressor.wkv")
        self._wgate = ctx.linear(f"{prefix}.compressor.wgate") if plan.ratio > 1 else None
        self._norm = ctx.weights.dense(f"{prefix}.compressor.norm.weight")
        self._wk = ctx.linear(f"{prefix}.indexer.wk")
        self._k_norm = ctx.weights.dense(f"{prefix}.indexer.k_norm.weight")

    def __call__(self, x: torch.Tensor, step: StepState) -> None:
        """Write the entries that the rows x [T, C] (normed, not rounded) complete."""
        layer, ops = self._plan.layer_id, self._ops
        plan = step.batch.compression[self._plan.ratio]
        pooled = ops.linear(x, self._wkv)
        if self._wgate is not None:
            pooled = ops.pool_groups(pooled, ops.linear(x, self._wgate), step.caches.partial(layer), plan)
        if not len(plan.dst):
            return
        latent = ops.rms_norm(pooled, self._norm, self._eps)
        rotary = self._rotary.upto(step.batch.max_context)
        entry = ops.rotate(latent, plan.positions, rotary)
        if self._ctx.numerics.compressed:
            entry = ops.round_fp4(entry, COMPRESSED_GROUP, "e4m3")
        ops.write_rows(step.caches.entries(layer), plan.dst, entry)
        key = ops.rotate(ops.rms_norm(ops.linear(latent, self._wk), self._k_norm, self._eps), plan.positions, rotary)
        if self._ctx.numerics.index:
            key = ops.round_fp4(key, INDEX_GROUP, "ue8m0")
        ops.write_rows(step.caches.index_keys(layer), plan.dst, key)
