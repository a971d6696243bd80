"""Indexer: cheap scores that pick the compressed entries a query attends to."""

from __future__ import annotations

import torch

from ..config.engine import BLOCK_TOKENS
from ..config.topology import LayerPlan
from ..ops.indexer import SelectionRule
from .common import ModelContext, RotaryTable, StepState
from .compressor import INDEX_GROUP


class Indexer:
    """The query side of `attn.indexer.*` of an index-source layer."""

    def __init__(self, ctx: ModelContext, prefix: str, plan: LayerPlan, rotary: RotaryTable) -> None:
        config = ctx.config
        self._ctx, self._ops, self._plan, self._rotary = ctx, ctx.ops, plan, rotary
        self._heads, self._width = config.index_n_heads, config.index_head_dim
        self._wq_b = ctx.linear(f"{prefix}.indexer.wq_b")
        self._weights_proj = ctx.linear(f"{prefix}.indexer.weights_proj")
        self._scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self._rule = SelectionRule(
            ratio=plan.ratio,
            entries_per_block=BLOCK_TOKENS // plan.ratio,
            topk=config.index_topk,
            block_size=config.candidate_block_size,
            topk_blocks=config.candidate_topk_blocks,
            publishes=plan.is_candidate_source,
        )

    def __call__(self, x: torch.Tensor, qr: torch.Tensor, step: StepState) -> None:
        """Publish the selection of the rows x [T, C] (normed) with low-rank queries qr [T, q_lora_rank] (rounded)."""
        ops, batch, source = self._ops, step.batch, self._plan.kv_source
        assert source is not None, "an index source has compressed entries to select from"
        q = ops.linear(qr, self._wq_b).view(-1, self._heads, self._width)
        q = ops.rotate(q, batch.positions, self._rotary.upto(batch.max_context))
        if self._ctx.numerics.index:
            q = ops.round_fp4(q, INDEX_GROUP, "ue8m0")
        weights = ops.linear(x, self._weights_proj) * self._scale
        candidates = step.candidates if self._plan.uses_candidates else None
        step.selection = ops.select_entries(q, weights, step.caches.index_keys(source), batch, self._rule, candidates)
        if self._rule.publishes:
            step.candidates = step.selection.blocks
