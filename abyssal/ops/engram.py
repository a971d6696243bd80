"""Engram: hashed n-gram memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class EngramHash:
    """Constants of one layer's hash.

    Attributes:
        token_map: int64 [V], raw id to compressed id.
        pad: compressed id that stands before the start of a sequence.
        multipliers: int64 [max_ngram], odd.
        primes: int64 [(max_ngram - 1) * heads], ascending n, then head.
        offsets: int64, first table row of each of them.
    """

    token_map: torch.Tensor
    pad: int
    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor


class EngramRows(Protocol):
    def __call__(self, ngram_ids: torch.Tensor, hashing: EngramHash) -> torch.Tensor:
        """Table rows that each position looks up.

        t_i is the compressed id at p - i, or `pad` where there is none. H = t_0 m_0; for i = 1, 2, ..: H ^= t_i m_i, and the
        heads of the (i+1)-grams take H mod prime + offset.

        Args:
            ngram_ids: int32 [T, max_ngram] raw ids at p, p - 1, ..; -1 where there is none (and at all older ones).

        Returns:
            int64 [T, (max_ngram - 1) * heads].
        """
        ...


class EngramGate(Protocol):
    def __call__(self, h: torch.Tensor, key_value: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """h[j] + g_j value, with g_j = sigmoid(sign(d) sqrt(max(|d|, 1e-6))) and
        d = sum_c h[j] weight[j] key[j] * rsqrt(mean h[j]^2 + eps) * rsqrt(mean key[j]^2 + eps) * C^-0.5.

        Args:
            h: [T, n, C].
            key_value: [T, n + 1, C]; keys of the streams, then the value they share.
            weight: [n, C], product of the query's and the key's norm weights.

        Returns:
            A new [T, n, C].
        """
        ...
