"""Hyper-connections in plain torch. Contracts: `abyssal.ops.hyper_connection`."""

from __future__ import annotations

import torch

from ...ops.hyper_connection import HyperParams
from ...ops.linear import LinearWeight
from .linear import linear
from .norm_rope import rms_norm


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Nearly doubly stochastic matrices from logits [..., n, n]; softmax and first column step count as one iteration."""
    comb = torch.softmax(logits, -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def hc_map(
    h: torch.Tensor, fn: LinearWeight, base: torch.Tensor, scale: torch.Tensor, params: HyperParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = params.num_streams
    v = h.flatten(1)
    m = linear(v, fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + params.norm_eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + params.eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return pre, post, sinkhorn(logits, params.sinkhorn_iters, params.eps)


def hc_collapse(h: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm((pre.unsqueeze(-1) * h).sum(1), weight, eps)


def hc_expand(y: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    return post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tjk,tjc->tkc", comb, h)
