"""FlashModel: DeepSeek-V4.1-Flash from token ids to logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config.topology import LayerPlan, Topology
from ..core.batch import ForwardBatch
from .attention import CSA2Attention
from .common import Caches, ModelContext, RotaryTable, StepState, initial_streams, window_inv_freq, yarn_inv_freq
from .engram import Engram
from .hyper_connection import HyperConnection
from .moe import MoE


class DecoderLayer:
    """Engram where there is one, attention, experts; each inside its hyper-connection."""

    def __init__(self, ctx: ModelContext, plan: LayerPlan, rotary: RotaryTable, token_map: torch.Tensor) -> None:
        prefix, config = f"layers.{plan.layer_id}", ctx.config
        has_engram = plan.engram_index is not None
        self._engram = Engram(ctx, f"{prefix}.engram", plan.layer_id, token_map) if has_engram else None
        self._attn_site = HyperConnection(ctx, prefix, "attn")
        self._attn = CSA2Attention(ctx, f"{prefix}.attn", plan, rotary)
        self._ffn_site = HyperConnection(ctx, prefix, "ffn")
        self._ffn = MoE(ctx, f"{prefix}.ffn", config.n_routed_experts, config.num_experts_per_tok)

    def __call__(self, h: torch.Tensor, pre: torch.Tensor, step: StepState) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams h [T, n, C] and collapse weights pre [T, n] from the layer before; returns both for the next."""
        if self._engram is not None:
            h = self._engram(h, step)
        pre_ffn, post, comb = self._attn_site.mix(h)
        h = self._attn_site.expand(self._attn(self._attn_site.collapse(h, pre), step), h, post, comb)
        pre_next, post, comb = self._ffn_site.mix(h)
        h = self._ffn_site.expand(self._ffn(self._ffn_site.collapse(h, pre_ffn)), h, post, comb)
        return h, pre_next

    def compress(self, h: torch.Tensor, pre: torch.Tensor, step: StepState) -> None:
        """Of all that the layer does, only write the compressed entries of the rows h, pre."""
        if self._engram is not None:
            h = self._engram(h, step)
        self._attn.compress(self._attn_site.collapse(h, pre), step)


class FlashModel:
    """The language model. Built once; holds no state of any sequence.

    Attributes:
        embed, head: shared with the drafter.
    """

    def __init__(
        self,
        ctx: ModelContext,
        topology: Topology,
        token_map: torch.Tensor,
        on_layer: Callable[[int], None] = lambda layer: None,
    ) -> None:
        """Load all layers; `on_layer` is told of each one done."""
        config = ctx.config
        self._ctx, self._ops, self._decoder_start = ctx, ctx.ops, topology.decoder_start
        self.embed = ctx.weights.matrix("embed")
        window = RotaryTable(window_inv_freq(config), ctx.device)
        compressed = RotaryTable(yarn_inv_freq(config), ctx.device)
        self._layers = []
        for plan in topology.layers:
            self._layers.append(DecoderLayer(ctx, plan, compressed if plan.ratio else window, token_map))
            on_layer(plan.layer_id)
        self._norm = ctx.weights.dense("norm.weight")
        self.head = ctx.linear("head")

    def forward(self, batch: ForwardBatch, caches: Caches, features: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Logits float32 [M, V] of `batch.logit_rows`; writes the caches.

        Args:
            features: gets the mean over the streams that enter each target layer of the drafter, [W, C], of the rows in
                `batch.window`, or in that of its tail.
        """
        step = StepState(batch, caches)
        h, pre = initial_streams(self.embed, batch.token_ids, self._ctx.config.hc_mult)
        targets = () if features is None else self._ctx.config.dspark_target_layer_ids
        for layer_id, layer in enumerate(self._layers):
            if layer_id == self._decoder_start and batch.tail is not None:
                # bounded replay: of a prompt, the decoder half leaves nothing behind but its last rows and these entries
                layer.compress(h, pre, step)
                rows, batch = batch.tail.rows.long(), batch.tail.batch
                h, pre, step = h[rows], pre[rows], StepState(batch, caches, entries_written=True)
            if features is not None and layer_id in targets:
                features.append(h[batch.window.rows.long()].mean(1))
            if not len(h):
                continue
            h, pre = layer(h, pre, step)
        if not len(batch.logit_rows):
            return h.new_empty(0, self._ctx.config.vocab_size)
        rows = batch.logit_rows.long()
        y = self._ops.hc_collapse(h[rows], pre[rows], self._norm, self._ctx.config.rms_norm_eps)
        return self._ops.linear(y, self.head)
