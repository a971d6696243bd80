"""CSA2Attention: low-rank queries over a sliding window of latents and the shared compressed entries."""

from __future__ import annotations

import torch

from ..config.topology import LayerPlan
from .common import ModelContext, RotaryTable, StepState
from .compressor import Compressor
from .indexer import Indexer


class CSA2Attention:
    """`attn.*` of one layer, with the compressor and the indexer where the layer owns them."""

    def __init__(self, ctx: ModelContext, prefix: str, plan: LayerPlan, rotary: RotaryTable) -> None:
        config, weights = ctx.config, ctx.weights
        self._ctx, self._ops, self._plan, self._rotary = ctx, ctx.ops, plan, rotary
        self._eps, self._window = config.rms_norm_eps, config.sliding_window
        self._heads, self._width, self._groups = config.num_attention_heads, config.head_dim, config.o_groups
        self._wq_a = ctx.linear(f"{prefix}.wq_a")
        self._q_norm = weights.dense(f"{prefix}.q_norm.weight")
        self._wq_b = ctx.linear(f"{prefix}.wq_b")
        self._wkv = ctx.linear(f"{prefix}.wkv")
        self._kv_norm = weights.dense(f"{prefix}.kv_norm.weight")
        self._sink = weights.dense(f"{prefix}.attn_sink")
        self._wo_a = ctx.linear(f"{prefix}.wo_a")
        self._wo_b = ctx.linear(f"{prefix}.wo_b")
        self._compressor = Compressor(ctx, prefix, plan, rotary) if plan.owns_compressed else None
        self._indexer = Indexer(ctx, prefix, plan, rotary) if plan.selects else None

    def __call__(self, x: torch.Tensor, step: StepState) -> torch.Tensor:
        """Attention output [T, C] of the normed rows x [T, C]; writes this layer's caches."""
        ops, batch, rounded = self._ops, step.batch, self._ctx.round_activations
        rotary = self._rotary.upto(batch.max_context)
        xq = rounded(x)
        qr = rounded(ops.rms_norm(ops.linear(xq, self._wq_a), self._q_norm, self._eps))
        q = ops.rotate(ops.linear(qr, self._wq_b).view(-1, self._heads, self._width), batch.positions, rotary)
        kv = ops.linear(xq, self._wkv)
        kv = ops.window_rows(kv, self._kv_norm, self._eps, batch.positions, rotary, self._ctx.numerics.window)
        # entries of this very step are visible to its later rows, so they are written before anything is selected
        if not step.entries_written:
            self.compress(x, step)
        if self._indexer is not None:
            self._indexer(x, qr, step)
        ring = step.caches.window(self._plan.layer_id)
        o = ops.sparse_attention(q, kv, ring, *self._shared_entries(step), self._sink, batch, self._window, rotary)
        # the ring holds what earlier rows of this step still read, so it is overwritten only now
        ops.write_rows(ring.view(-1, self._width), batch.window.dst, kv, batch.window.rows)
        # wo_a takes its input unrounded: the trained model runs it in bf16 although its weights are FP8
        z = ops.grouped_linear(o.view(len(o), self._groups, -1), self._wo_a)
        return ops.linear(rounded(z), self._wo_b)

    def compress(self, x: torch.Tensor, step: StepState) -> None:
        """Write the compressed entries that the normed rows x [T, C] complete, if this layer owns any."""
        if self._compressor is not None:
            self._compressor(x, step)

    def _shared_entries(self, step: StepState) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The source layer's entries and each row's selection among them."""
        if self._plan.kv_source is None:
            return None, None
        assert step.selection is not None, f"no layer at or before {self._plan.layer_id} published a selection"
        return step.caches.entries(self._plan.kv_source), step.selection.entries
