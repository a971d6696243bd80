"""Engram in plain torch. Contracts: `abyssal.ops.engram`."""

from __future__ import annotations

import torch

from ...ops.engram import EngramHash


def engram_rows(ngram_ids: torch.Tensor, hashing: EngramHash) -> torch.Tensor:
    ids = ngram_ids.long()
    terms = torch.where(ids < 0, hashing.pad, hashing.token_map[ids.clamp_min(0)]) * hashing.multipliers
    orders = terms.shape[1] - 1
    heads = len(hashing.primes) // orders
    mixed = terms[:, :1]
    columns = []
    for i in range(1, orders + 1):
        mixed = mixed ^ terms[:, i : i + 1]
        columns.append(mixed.expand(-1, heads))
    return torch.cat(columns, 1) % hashing.primes + hashing.offsets


def engram_gate(h: torch.Tensor, key_value: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    keys, value = key_value[:, :-1], key_value[:, -1:]
    norms = torch.rsqrt(h.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    d = (h * weight * keys).sum(-1) * norms * h.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(d.abs().clamp_min(1e-6).sqrt(), d))
    return h + gate.unsqueeze(-1) * value
