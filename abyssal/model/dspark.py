"""DSpark: drafts a block of tokens in one parallel pass over a few stages, then chains them by a low-rank bigram bias.

The drafter reads what the target model computed anyway: the mean over its residual streams where they enter three of its
last layers. `observe` projects that once for each token into the window rows of every stage, so that a stage attends to the
text without having run over it. `propose` then runs a block of rows, the newest token (the anchor) and noise, whose row j
predicts the token j + 1 places after the anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.batch import DraftBatch, ForwardBatch
from ..ops.linear import LinearWeight
from ..quant.formats import StoredMatrix
from .common import Caches, ModelContext, RotaryTable, initial_streams, window_inv_freq
from .hyper_connection import HyperConnection
from .moe import MoE

MAX_CONFIDENCE_LOGIT = 60.0
"""Beyond it a sigmoid of float64 is 0 or 1 to the last bit, and its logit would be lost."""


@dataclass(frozen=True)
class DraftBlock:
    """What the parallel pass found for R blocks of B rows.

    Attributes:
        hidden: [R, B, C], before the final norm.
        base_logits: [R, B, V], before the bias of the token before.
    """

    hidden: torch.Tensor
    base_logits: torch.Tensor


@dataclass(frozen=True)
class DraftChain:
    """Tokens drawn one after another from R blocks, k of each.

    Attributes:
        token_ids: int32 [R, k].
        logits: [R, k, V] that they were drawn from.
        confidence: [R, k] logits of the confidence head: how likely each is accepted if those before it are.
    """

    token_ids: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor


class DraftAttention:
    """`attn.*` of one stage: a window of the target's features, and the whole block."""

    def __init__(self, ctx: ModelContext, prefix: str, layer_id: int, rotary: RotaryTable) -> None:
        config, weights = ctx.config, ctx.weights
        self._ctx, self._ops, self._layer_id, self._rotary = ctx, ctx.ops, layer_id, rotary
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

    def observe(self, features: torch.Tensor, batch: ForwardBatch, caches: Caches) -> None:
        """Write the window rows of projected features [W, C] of the rows in `batch.window`."""
        writes = batch.window
        positions = batch.positions[writes.rows.long()]
        rows = self._rows(features, positions, batch.max_context)
        self._ops.write_rows(caches.window(self._layer_id).view(-1, self._width), writes.dst, rows)

    def __call__(self, x: torch.Tensor, batch: DraftBatch, caches: Caches) -> torch.Tensor:
        """Attention output [R * B, C] of the normed rows x [R * B, C]. Writes nothing."""
        ops, rounded = self._ops, self._ctx.round_activations
        rotary = self._rotary.upto(batch.max_context)
        xq = rounded(x)
        qr = rounded(ops.rms_norm(ops.linear(xq, self._wq_a), self._q_norm, self._eps))
        q = ops.rotate(ops.linear(qr, self._wq_b).view(-1, self._heads, self._width), batch.positions, rotary)
        kv = self._rows(xq, batch.positions, batch.max_context)
        ring = caches.window(self._layer_id)
        o = ops.block_attention(q, kv, ring, self._sink, batch, self._window, rotary)
        z = ops.grouped_linear(o.view(len(o), self._groups, -1), self._wo_a)
        return ops.linear(rounded(z), self._wo_b)

    def _rows(self, x: torch.Tensor, positions: torch.Tensor, max_context: int) -> torch.Tensor:
        """Window KV rows of rounded inputs x."""
        rotary, rounded = self._rotary.upto(max_context), self._ctx.numerics.window
        return self._ops.window_rows(self._ops.linear(x, self._wkv), self._kv_norm, self._eps, positions, rotary, rounded)


class DraftStage:
    """`mtp.<i>.*`: a decoder layer whose attention is that of drafts."""

    def __init__(self, ctx: ModelContext, stage: int, rotary: RotaryTable) -> None:
        prefix, config = f"mtp.{stage}", ctx.config
        self._attn_site = HyperConnection(ctx, prefix, "attn")
        self.attn = DraftAttention(ctx, f"{prefix}.attn", config.num_hidden_layers + stage, rotary)
        self._ffn_site = HyperConnection(ctx, prefix, "ffn")
        self._ffn = MoE(ctx, f"{prefix}.ffn", config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)

    def __call__(
        self, h: torch.Tensor, pre: torch.Tensor, batch: DraftBatch, caches: Caches
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams h [T, n, C] and collapse weights pre [T, n] of the stage before; returns both for the next."""
        pre_ffn, post, comb = self._attn_site.mix(h)
        h = self._attn_site.expand(self.attn(self._attn_site.collapse(h, pre), batch, caches), h, post, comb)
        pre_next, post, comb = self._ffn_site.mix(h)
        h = self._ffn_site.expand(self._ffn(self._ffn_site.collapse(h, pre_ffn)), h, post, comb)
        return h, pre_next


class DSpark:
    """The drafter. Built once; holds no state of any sequence.

    Attributes:
        block_size: rows of a block, and tokens that it predicts. The trained one: another would change every row.
    """

    def __init__(self, ctx: ModelContext, embed: StoredMatrix, head: LinearWeight) -> None:
        """Load all stages; `embed` and `head` are the target model's."""
        config, weights = ctx.config, ctx.weights
        self.block_size = config.dspark_block_size
        self._ctx, self._ops, self._embed, self._head = ctx, ctx.ops, embed, head
        self._main_proj = ctx.linear("mtp.0.main_proj")
        self._main_norm = weights.dense("mtp.0.main_norm.weight")
        rotary = RotaryTable(window_inv_freq(config), ctx.device)
        self._stages = [DraftStage(ctx, stage, rotary) for stage in range(config.num_nextn_predict_layers)]
        last = f"mtp.{config.num_nextn_predict_layers - 1}"
        self._norm = weights.dense(f"{last}.norm.weight")
        self._markov_embed = weights.matrix(f"{last}.markov_head.embed")
        self._markov_head = ctx.linear(f"{last}.markov_head.head")
        confidence = weights.dense(f"{last}.confidence_head.proj.weight").squeeze(0)
        self._confidence_hidden = confidence[: config.hidden_size]
        self._confidence_markov = confidence[config.hidden_size :]

    def observe(self, features: torch.Tensor, batch: ForwardBatch, caches: Caches) -> None:
        """Take in the rows of a target step. Writes the stages' windows.

        Args:
            features: [W, targets * C], what `FlashModel.forward` gave, side by side.
        """
        rounded = self._ctx.round_activations
        main = self._ops.linear(rounded(features), self._main_proj)
        main = rounded(self._ops.rms_norm(main, self._main_norm, self._ctx.config.rms_norm_eps))
        for stage in self._stages:
            stage.attn.observe(main, batch, caches)

    def batch(self, anchor_ids: torch.Tensor, block_start: torch.Tensor, state_slot: torch.Tensor) -> DraftBatch:
        """Inputs of R blocks: int32 [R] anchors, their positions, and the slots of their sequences."""
        ids = torch.full((len(anchor_ids), self.block_size), self._ctx.config.dspark_noise_token_id, dtype=torch.int32)
        ids[:, 0] = anchor_ids
        positions = block_start.unsqueeze(1) + torch.arange(self.block_size, dtype=torch.int32)
        max_context = int(block_start.max()) + self.block_size
        return DraftBatch(ids.flatten(), positions.flatten(), block_start, state_slot, max_context)

    def propose(self, batch: DraftBatch, caches: Caches) -> DraftBlock:
        """The parallel pass. Writes nothing."""
        h, pre = initial_streams(self._embed, batch.token_ids, self._ctx.config.hc_mult)
        for stage in self._stages:
            h, pre = stage(h, pre, batch, caches)
        hidden = (pre.unsqueeze(-1) * h).sum(1)
        logits = self._ops.linear(self._ops.rms_norm(hidden, self._norm, self._ctx.config.rms_norm_eps), self._head)
        shape = (len(batch.block_start), self.block_size, -1)
        return DraftBlock(hidden.view(shape), logits.view(shape))

    def chain(
        self, block: DraftBlock, anchor_ids: torch.Tensor, length: int, choose: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> DraftChain:
        """Draw `length` tokens of each block, each under the bias of the one before it.

        Args:
            anchor_ids: int32 [R].
            choose: the tokens int32 [R] at place k of the chain (from 0), given their logits [R, V].
        """
        previous, ids, logits, confidence = anchor_ids, [], [], []
        for k in range(length):
            embedded = self._markov_embed.data[previous.long()].float()
            confidence.append(block.hidden[:, k] @ self._confidence_hidden + embedded @ self._confidence_markov)
            logits.append(block.base_logits[:, k] + self._ops.linear(embedded, self._markov_head))
            previous = choose(k, logits[-1])
            ids.append(previous)
        bounded = torch.stack(confidence, 1).clamp(-MAX_CONFIDENCE_LOGIT, MAX_CONFIDENCE_LOGIT)
        return DraftChain(torch.stack(ids, 1), torch.stack(logits, 1), bounded)
