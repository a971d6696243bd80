"""Engram: a memory of hashed n-grams, read by lookup and gated into each residual stream."""

from __future__ import annotations

import numpy as np
import torch

from ..config.engram_hash import engram_multipliers, engram_offsets, engram_primes
from ..config.model import TextConfig
from ..ops.engram import EngramHash
from .common import ModelContext, StepState


class Engram:
    """`engram.*` of one layer."""

    def __init__(self, ctx: ModelContext, prefix: str, layer_id: int, token_map: torch.Tensor) -> None:
        """`token_map` int64 [V]: raw id to compressed id."""
        config, weights = ctx.config, ctx.weights
        self._ctx, self._ops, self._eps = ctx, ctx.ops, config.rms_norm_eps
        self._hash = engram_hash(config, layer_id, token_map, ctx.device)
        self._table = weights.engram_table(f"{prefix}.embed")
        self._wkv = ctx.linear(f"{prefix}.wkv")
        # both act as norm weights inside one product, so they may be folded
        self._weight = weights.dense(f"{prefix}.q_weight") * weights.dense(f"{prefix}.k_weight")

    def __call__(self, h: torch.Tensor, step: StepState) -> torch.Tensor:
        """The streams h [T, n, C] with what their n-grams recall."""
        rows = self._ops.engram_rows(step.batch.ngram_ids, self._hash)
        recalled = self._table.gather(rows.flatten()).view(len(rows), -1)
        key_value = self._ops.linear(self._ctx.round_activations(recalled), self._wkv)
        return self._ops.engram_gate(h, key_value.view(len(h), h.shape[1] + 1, -1), self._weight, self._eps)


def engram_hash(config: TextConfig, layer_id: int, token_map: torch.Tensor, device: str = "cpu") -> EngramHash:
    """The constants of one layer's hash; `token_map` int64 [V], raw id to compressed id."""
    index = config.engram_layer_ids.index(layer_id)
    return EngramHash(
        token_map=token_map.to(device),
        pad=int(token_map[config.engram_pad_token_id]),
        multipliers=torch.from_numpy(np.asarray(engram_multipliers(config, layer_id), dtype=np.int64)).to(device),
        primes=torch.from_numpy(np.asarray(engram_primes(config)[index], dtype=np.int64)).to(device),
        offsets=torch.from_numpy(np.asarray(engram_offsets(config)[index], dtype=np.int64)).to(device),
    )
