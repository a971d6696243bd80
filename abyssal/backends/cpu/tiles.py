"""The torch reference made row-invariant: each op runs on tiles of a fixed number of rows, the last one padded with zeros.

torch picks kernels, blockings and vector tails by the shapes that it is given, so that a row's bits change with the number
of rows around it. With every shape fixed there is nothing left to choose. What is added up over a number of keys that
varies is added up in blocks of fixed width, in order; blocks beyond a row's own keys add zeros, which change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import attention, compressor, engram, hyper_connection, indexer, linear, moe, norm_rope

TILE = 16
"""Rows of a tile. Larger tiles are faster for long prompts and slower for single rows."""

KEYS = 64
"""Keys of a block."""


def in_tiles(fn: Callable[..., Any], *by_row: int) -> Callable[..., Any]:
    """`fn` on tiles of the arguments at the places `by_row`, the results put together. Arguments may be None."""

    @functools.wraps(fn)
    def tiled(*args: Any) -> Any:
        num_rows = len(args[by_row[0]])
        results = []
        for begin in range(0, max(num_rows, 1), TILE):
            parts = list(args)
            for place in by_row:
                if args[place] is not None:
                    parts[place] = _tile(args[place], begin)
            results.append(fn(*parts))
        if isinstance(results[0], tuple):
            return tuple(torch.cat(columns)[:num_rows] for columns in zip(*results, strict=True))
        return torch.cat(results)[:num_rows]

    return tiled


def _tile(x: torch.Tensor, begin: int) -> torch.Tensor:
    part = x[begin : begin + TILE]
    if len(part) == TILE:
        return part.contiguous()
    return torch.cat((part, part.new_zeros(TILE - len(part), *part.shape[1:])))


def _pad_keys(x: torch.Tensor, dim: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = -shape[dim] % KEYS
    return torch.cat((x, x.new_zeros(shape)), dim)


def _score_tile(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    blocks = _pad_keys(keys, 0).split(KEYS)
    return torch.cat([indexer.score_keys(q, weights, block) for block in blocks], 1)[:, : len(keys)]


def _attend_tile(q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    keys = _pad_keys(keys.masked_fill(~valid.unsqueeze(-1), 0.0), 1)
    absent = ~_pad_keys(valid, 1).unsqueeze(1)
    blocks, gaps = keys.split(KEYS, 1), absent.split(KEYS, 2)
    scale, floor = q.shape[-1] ** -0.5, sink.view(1, -1, 1)
    scores = [
        (torch.einsum("thd,tnd->thn", q, block.contiguous()) * scale).masked_fill(gap, -torch.inf)
        for block, gap in zip(blocks, gaps, strict=True)
    ]
    peak = functools.reduce(torch.maximum, [score.amax(-1, keepdim=True) for score in scores])
    peak = torch.maximum(peak, floor)
    total = torch.exp(floor - peak)
    out = torch.zeros_like(q)
    for score, block in zip(scores, blocks, strict=True):
        weights = torch.exp(score - peak)
        total = total + weights.sum(-1, keepdim=True)
        out = out + torch.einsum("thn,tnd->thd", weights, block.contiguous())
    return out / total


def tiled_entries() -> dict[str, Callable[..., Any]]:
    """Row-invariant versions of those reference ops that need one."""
    attend = in_tiles(_attend_tile, 0, 1, 2)
    return {
        "linear": in_tiles(linear.linear, 0),
        "grouped_linear": in_tiles(linear.grouped_linear, 0),
        "rms_norm": in_tiles(norm_rope.rms_norm, 0),
        "rotate": in_tiles(norm_rope.rotate, 0, 1),
        "window_rows": in_tiles(norm_rope.window_rows, 0, 3),
        "hc_map": in_tiles(hyper_connection.hc_map, 0),
        "hc_collapse": in_tiles(hyper_connection.hc_collapse, 0, 1),
        "hc_expand": in_tiles(hyper_connection.hc_expand, 0, 1, 2, 3),
        "pool_groups": _with(compressor.pool_groups, pool=in_tiles(compressor.pool_tokens, 0)),
        "select_entries": _with(indexer.select_entries, score_of=in_tiles(_score_tile, 0, 1)),
        "sparse_attention": _with(attention.sparse_attention, attend=attend),
        "block_attention": _with(attention.block_attention, attend=attend),
        "route": in_tiles(moe.route, 0),
        "experts": _with(moe.experts, run=in_tiles(moe.run_expert, 0, 1)),
        "engram_gate": in_tiles(engram.engram_gate, 0, 1),
    }


def _with(fn: Callable[..., Any], **parts: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with some of its parts exchanged, still under its own name."""
    return functools.wraps(fn)(functools.partial(fn, **parts))
