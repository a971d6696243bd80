"""The card's op table: kernels of ours where there are some, plain torch on the card, and sampling on the host.

Weights held "packed" go through our kernels, whose inputs and results are bfloat16; weights held "decoded" are float32 and
are multiplied in float32, for comparisons with the CPU. The choice is made where a matrix is taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ops.linear import HeldAs, LinearWeight
from ...ops.moe import ExpertWeights, StoredExpert
from ...ops.registry import OpTable, build_table
from ...quant.convert import decode
from ...quant.formats import StoredMatrix
from ..cpu import linear as reference_linear
from ..cpu import moe as reference_moe
from ..cpu import tiles
from ..cpu.table import REFERENCE, cpu_table
from . import attention, build, linear, moe, quantize
from .on_card import on_card, on_host

_SAMPLING = ("adjust_logits", "cut_tokens", "draw_tokens", "rank_tokens")


def prepare_linear(matrices: Sequence[StoredMatrix], held_as: HeldAs) -> LinearWeight:
    if held_as == "packed":
        return linear.prepare_linear(matrices, held_as)
    dense = torch.cat([decode(matrix).to("cuda") for matrix in matrices])
    return LinearWeight(dense.shape[0], dense.shape[1], dense)


def multiply(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    return linear.linear(x, weight).float()


def grouped_multiply(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    if isinstance(weight.handle, torch.Tensor):
        return reference_linear.grouped_linear(x, weight)
    return linear.grouped_linear(x, weight).float()


def prepare_experts(routed: Sequence[StoredExpert], shared: StoredExpert, held_as: HeldAs) -> ExpertWeights:
    if held_as == "packed":
        return moe.prepare_experts(routed, shared, held_as)

    def prepared(expert: StoredExpert) -> reference_moe.Expert:
        return prepare_linear([expert.w1, expert.w3], held_as), prepare_linear([expert.w2], held_as)

    handle = [prepared(expert) for expert in (*routed, shared)]
    return ExpertWeights(len(routed), shared.w1.in_features, shared.w1.out_features, handle)


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, limit: float, rounded: bool
) -> torch.Tensor:
    if isinstance(experts.handle, list):
        return reference_moe.experts(x, ids, weights, experts, limit, rounded, run=_run_decoded)
    # rounded here from float32; rounding twice changes nothing, but rounding after bfloat16 would
    return moe.experts(quantize.round_fp8(x) if rounded else x, ids, weights, experts, limit, rounded).float()


def _run_decoded(
    x: torch.Tensor, weight: torch.Tensor | None, expert: reference_moe.Expert, limit: float, rounded: bool
) -> torch.Tensor:
    gate, up = multiply(x, expert[0]).chunk(2, -1)
    t = torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    t = t if weight is None else t * weight
    return multiply(quantize.round_fp8(t) if rounded else t, expert[1])


def hc_map(
    h: torch.Tensor, fn: LinearWeight, base: torch.Tensor, scale: torch.Tensor, params: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from ..cpu.hyper_connection import sinkhorn

    n, v = params.num_streams, h.flatten(1)
    m = multiply(v, fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + params.norm_eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + params.eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return pre, post, sinkhorn(logits, params.sinkhorn_iters, params.eps)


OURS: dict[str, Callable[..., Any]] = {
    "round_fp8": quantize.round_fp8,
    "prepare_linear": prepare_linear,
    "linear": multiply,
    "grouped_linear": grouped_multiply,
    "prepare_experts": prepare_experts,
    "sparse_attention": attention.sparse_attention,
    "route": moe.route,
    "experts": run_experts,
}
"""Ops with kernels of ours."""


def cuda_table(num_threads: int = 1, *, invariant: bool = False) -> OpTable:
    """The table for the current card, its kernels built.

    Args:
        num_threads: of the host, for sampling.
        invariant: a row's bits do not depend on the rows around it. Ops in torch then run on tiles of fixed size, slower.

    Raises:
        UnsupportedOnBackend: no card, no kernels for it, or no compiler.
    """
    build.build_all()
    entries = {name: on_card(fn) for name, fn in REFERENCE.items()}
    entries["hc_map"] = on_card(hc_map)
    if invariant:
        entries |= {name: on_card(fn) for name, fn in tiles.tiled_entries().items()}
        entries["hc_map"] = on_card(tiles.in_tiles(hc_map, 0))
    host = cpu_table("auto", num_threads)
    entries |= {name: on_host(getattr(host, name)) for name in _SAMPLING}
    return build_table("cuda", entries | OURS)
