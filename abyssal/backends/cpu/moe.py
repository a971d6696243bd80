"""Routing and experts in plain torch. Contracts: `abyssal.ops.moe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ...ops.linear import HeldAs, LinearWeight
from ...ops.moe import ExpertWeights, StoredExpert
from .linear import linear, prepare_linear
from .quantize import round_fp8

Expert = tuple[LinearWeight, LinearWeight]
"""w1 over w3, and w2."""
RunExpert = Callable[[torch.Tensor, torch.Tensor | None, Expert, float, bool], torch.Tensor]


def _prepare(expert: StoredExpert, held_as: HeldAs) -> Expert:
    return prepare_linear([expert.w1, expert.w3], held_as), prepare_linear([expert.w2], held_as)


def prepare_experts(routed: Sequence[StoredExpert], shared: StoredExpert, held_as: HeldAs) -> ExpertWeights:
    handle = [_prepare(e, held_as) for e in (*routed, shared)]
    return ExpertWeights(len(routed), shared.w1.in_features, shared.w1.out_features, handle)


def route(
    x: torch.Tensor, gate: LinearWeight, bias: torch.Tensor, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = F.softplus(linear(x, gate)).sqrt()
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    picked = scores.gather(1, ids)
    return ids.to(torch.int32), scale * picked / (picked.sum(-1, keepdim=True) + 1e-20)


def run_expert(x: torch.Tensor, weight: torch.Tensor | None, expert: Expert, limit: float, rounded: bool) -> torch.Tensor:
    """One expert on rows x [T, C], weighed by weight [T, 1] or not at all."""
    gate, up = linear(x, expert[0]).chunk(2, -1)
    t = F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    if weight is not None:
        t = t * weight
    return linear(round_fp8(t) if rounded else t, expert[1])


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    limit: float,
    rounded: bool,
    run: RunExpert = run_expert,
) -> torch.Tensor:
    x = round_fp8(x) if rounded else x
    top_k = ids.shape[1]
    parts = x.new_empty(x.shape[0] * top_k, x.shape[1])
    flat = ids.flatten()
    for e in flat.unique().tolist():
        pair = (flat == e).nonzero().squeeze(1)
        parts[pair] = run(x[pair // top_k], weights.flatten()[pair, None], experts.handle[e], limit, rounded)
    shared = run(x, None, experts.handle[experts.num_routed], limit, rounded)
    total = torch.zeros_like(x)
    for slot in range(top_k):
        total += parts[slot::top_k]
    return total + shared
