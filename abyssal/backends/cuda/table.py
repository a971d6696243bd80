"""The card's op table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ops.registry import OpTable, build_table
from . import build, linear, moe, quantize

ENTRIES: dict[str, Callable[..., Any]] = {
    "round_fp8": quantize.round_fp8,
    "prepare_linear": linear.prepare_linear,
    "linear": linear.linear,
    "grouped_linear": linear.grouped_linear,
    "prepare_experts": moe.prepare_experts,
    "route": moe.route,
    "experts": moe.experts,
}


def cuda_table() -> OpTable:
    """The table for the current card, its kernels built.

    Raises:
        UnsupportedOnBackend: no card, no kernels for it, no compiler, or an op that is not there yet.
    """
    table = build_table("cuda", ENTRIES)
    build.build_all()
    return table
