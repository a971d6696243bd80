"""The CPU's op table: the torch reference, with native kernels where they were built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from ...core.errors import UnsupportedOnBackend
from ...ops.registry import OpTable, build_table
from . import (
    attention,
    compressor,
    engram,
    hyper_connection,
    indexer,
    linear,
    moe,
    native,
    norm_rope,
    quantize,
    sampling,
    tiles,
)

log = logging.getLogger(__name__)

REFERENCE: dict[str, Callable[..., Any]] = {
    "round_fp8": quantize.round_fp8,
    "round_fp4": quantize.round_fp4,
    "prepare_linear": linear.prepare_linear,
    "linear": linear.linear,
    "grouped_linear": linear.grouped_linear,
    "rms_norm": norm_rope.rms_norm,
    "rotate": norm_rope.rotate,
    "window_rows": norm_rope.window_rows,
    "write_rows": norm_rope.write_rows,
    "hc_map": hyper_connection.hc_map,
    "hc_collapse": hyper_connection.hc_collapse,
    "hc_expand": hyper_connection.hc_expand,
    "pool_groups": compressor.pool_groups,
    "select_entries": indexer.select_entries,
    "sparse_attention": attention.sparse_attention,
    "block_attention": attention.block_attention,
    "prepare_experts": moe.prepare_experts,
    "route": moe.route,
    "experts": moe.experts,
    "engram_rows": engram.engram_rows,
    "engram_gate": engram.engram_gate,
    "adjust_logits": sampling.adjust_logits,
    "cut_tokens": sampling.cut_tokens,
    "draw_tokens": sampling.draw_tokens,
    "rank_tokens": sampling.rank_tokens,
}


def torch_table(*, invariant: bool = False) -> OpTable:
    """Plain torch for every op; `invariant` as in `cpu_table`."""
    return build_table("cpu (torch)", REFERENCE | tiles.tiled_entries() if invariant else REFERENCE)


def choose_backend(wanted: Literal["auto", "native", "torch"]) -> Literal["native", "torch"]:
    """Decide "auto": native kernels where they were built, otherwise plain torch, with a warning.

    Raises:
        UnsupportedOnBackend: `native` was asked for and is not there.
    """
    if wanted == "torch" or native.load() is not None:
        return "torch" if wanted == "torch" else "native"
    if wanted == "native":
        raise UnsupportedOnBackend(f"backend='native': {native.why_missing()}; backend='torch' runs without it, slower")
    log.warning("native kernels are not available (%s); running plain torch, which is much slower", native.why_missing())
    return "torch"


def cpu_table(backend: Literal["auto", "native", "torch"], num_threads: int, *, invariant: bool = True) -> OpTable:
    """The table for this processor; see `choose_backend`.

    Args:
        invariant: a row's bits do not depend on the rows around it. Costs nothing with native kernels, which are so anyhow.
    """
    library = native.load() if choose_backend(backend) == "native" else None
    if library is None:
        return torch_table(invariant=invariant)
    return build_table("cpu (native)", REFERENCE | native.entries(library, num_threads))
