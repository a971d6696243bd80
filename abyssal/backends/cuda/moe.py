"""Routing and experts. Contracts: `abyssal.ops.moe`.

Pairs (token, slot) are sorted by expert; both products run over tiles of one expert's rows; the parts of a token are added
in the order of its slots. Parts are bfloat16, their sum is not rounded before the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.errors import UnsupportedOnBackend
from ...ops.linear import HeldAs, LinearWeight
from ...ops.moe import ExpertWeights, StoredExpert
from .build import library
from .gemm import PROCESSORS, SHAPES, SwiGlu, Tiles, TileShape, multiply
from .linear import linear
from .packing import PackedMatrix, check_scales, empty_packed, pack_into, packed_format

MAX_EXPERTS = 512
GATE_PARTS = 8
"""The gate has few rows: its input is cut so that enough processors take part. Fixed, as it decides the order of sums."""

_SMALL, _WIDE, _LARGE = SHAPES["fp4"]
_LARGE_MEAN = 48
_SORT_BLOCK = 1024
_WIDE_TILES = 5 * PROCESSORS


@dataclass(frozen=True)
class PackedExperts:
    """w1 paired with w3, and w2: of the routed experts, one group each, and of the shared one."""

    up: PackedMatrix
    down: PackedMatrix
    shared_up: PackedMatrix
    shared_down: PackedMatrix


def _pack_experts(experts: Sequence[StoredExpert]) -> tuple[PackedMatrix, PackedMatrix]:
    first = experts[0]
    if first.w1.out_features % 32:
        raise UnsupportedOnBackend(f"backend cuda: expert width {first.w1.out_features} is no multiple of 32")
    up = empty_packed(packed_format(first.w1), len(experts), first.w1.out_features, first.w1.in_features, paired=True)
    down = empty_packed(packed_format(first.w2), len(experts), first.w2.out_features, first.w2.in_features)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    for i, expert in enumerate(experts):
        pack_into(up, i, [expert.w1], expert.w3, flag)
        pack_into(down, i, [expert.w2], None, flag)
    check_scales(flag, first.w1.name)
    return up, down


def prepare_experts(routed: Sequence[StoredExpert], shared: StoredExpert, held_as: HeldAs) -> ExpertWeights:
    if len(routed) > MAX_EXPERTS:
        raise UnsupportedOnBackend(f"backend cuda: {len(routed)} experts; the limit is {MAX_EXPERTS}")
    handle = PackedExperts(*_pack_experts(routed), *_pack_experts([shared]))
    return ExpertWeights(len(routed), shared.w1.in_features, shared.w1.out_features, handle)


def route(
    x: torch.Tensor, gate: LinearWeight, bias: torch.Tensor, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, num_experts = len(x), gate.out_features
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, top_k, device=x.device)
    if not tokens:
        return ids, weights
    if isinstance(gate.handle, PackedMatrix):
        parts = min(GATE_PARTS, gate.handle.chunks.shape[2])
        logits = torch.empty(parts, tokens, num_experts, device=x.device)
        multiply(gate.handle, x.to(torch.bfloat16).contiguous(), logits, "f32", parts=parts)
    else:
        parts, logits = 1, linear(x, gate)
    pointers = (ids.data_ptr(), weights.data_ptr())
    library("moe").call("route", logits.data_ptr(), parts, bias.data_ptr(), tokens, num_experts, top_k, scale, *pointers)
    return ids, weights


def plan_tiles(pairs: int, tokens: int, num_experts: int, chunk_rows: int) -> tuple[TileShape, int]:
    """Tile shape and tokens of a tile, from how many rows an expert gets on average. The choice does not change results."""
    mean = pairs / num_experts
    if mean > _LARGE_MEAN:
        return _LARGE, _LARGE.widths[-1]
    likely = min(tokens, math.ceil(mean + 4 * math.sqrt(mean) + 2))
    hit = num_experts * (1 - (1 - 1 / num_experts) ** pairs)
    shape = _WIDE if hit * -(-chunk_rows // _WIDE.chunks) > _WIDE_TILES else _SMALL
    return shape, shape.width_for(likely)


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, limit: float, rounded: bool
) -> torch.Tensor:
    packed: PackedExperts = experts.handle
    tokens, top_k = ids.shape
    x = x.to(torch.bfloat16).contiguous()
    out = torch.empty_like(x)
    if not tokens:
        return out
    pairs = tokens * top_k
    position, row_weight, tiles = _sort(ids, weights, experts.num_routed, packed.up.chunks.shape[1])
    # rows of the pairs by expert, then those of the tokens for the shared expert
    rows = torch.empty(pairs + tokens, x.shape[1], dtype=torch.bfloat16, device=x.device)
    targets = (rows.data_ptr(), rows[pairs:].data_ptr())
    library("moe").call("gather_rows", x.data_ptr(), position.data_ptr(), tokens, x.shape[1], top_k, rounded, *targets)
    parts = _feed_forward(rows, packed, SwiGlu(limit, rounded, row_weight), tiles)
    sources = (parts.data_ptr(), position.data_ptr(), parts[pairs:].data_ptr())
    library("moe").call("combine_rows", *sources, tokens, x.shape[1], top_k, out.data_ptr())
    return out


def _feed_forward(x: torch.Tensor, experts: PackedExperts, swiglu: SwiGlu, tiles: Tiles) -> torch.Tensor:
    """The experts of sorted rows, and the shared one of the rows after them."""
    middle = torch.empty(len(x), experts.up.out_features, dtype=torch.bfloat16, device=x.device)
    out = torch.empty_like(x)
    if tiles.shape.takes_other and experts.shared_up.format == "fp8":
        multiply(experts.up, x, middle, "swiglu", tiles=tiles, swiglu=swiglu, other=experts.shared_up)
        multiply(experts.down, middle, out, "bf16", tiles=tiles, other=experts.shared_down)
        return out
    sorted_rows, shared_rows = slice(0, tiles.num_rows), slice(tiles.num_rows, None)
    multiply(experts.up, x[sorted_rows], middle, "swiglu", tiles=tiles, swiglu=swiglu)
    multiply(experts.down, middle[sorted_rows], out, "bf16", tiles=tiles)
    multiply(experts.shared_up, x[shared_rows], middle[shared_rows], "swiglu", swiglu=SwiGlu(swiglu.limit, swiglu.rounded))
    multiply(experts.shared_down, middle[shared_rows], out[shared_rows], "bf16")
    return out


def _sort(
    ids: torch.Tensor, weights: torch.Tensor, num_experts: int, chunk_rows: int
) -> tuple[torch.Tensor, torch.Tensor, Tiles]:
    """Place of each pair when pairs are ordered by expert, weights in that order, and tiles."""
    pairs, device = ids.numel(), ids.device
    shape, tokens = plan_tiles(pairs, len(ids), num_experts, chunk_rows)
    most = min(pairs, num_experts) + pairs // tokens
    position = torch.empty(pairs, dtype=torch.int32, device=device)
    row_weight = torch.empty(pairs, device=device)
    totals = torch.empty(-(-pairs // _SORT_BLOCK), num_experts, dtype=torch.int32, device=device)
    entries = torch.empty(most, 4, dtype=torch.int32, device=device)
    tiles = Tiles(entries, torch.empty(1, dtype=torch.int32, device=device), tokens, shape, pairs)
    library("moe").call(
        "sort_pairs",
        ids.contiguous().data_ptr(),
        weights.contiguous().data_ptr(),
        pairs,
        num_experts,
        tokens,
        position.data_ptr(),
        row_weight.data_ptr(),
        tiles.entries.data_ptr(),
        tiles.count.data_ptr(),
        totals.data_ptr(),
    )
    return position, row_weight, tiles
