"""The table of ops that a backend fills, checked at start-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..core.errors import UnsupportedOnBackend
from .attention import BlockAttention, SparseAttention
from .compressor import PoolGroups
from .engram import EngramGate, EngramRows
from .hyper_connection import HcCollapse, HcExpand, HcMap
from .indexer import SelectEntries
from .linear import GroupedLinear, Linear, PrepareLinear
from .moe import Experts, PrepareExperts, Route
from .norm_rope import RmsNorm, Rotate, WindowRows, WriteRows
from .quantize import RoundFp4, RoundFp8
from .sampling import AdjustLogits, CutTokens, DrawTokens, RankTokens


@dataclass(frozen=True)
class OpTable:
    """One callable for each op. The contracts stand in the modules beside this one."""

    round_fp8: RoundFp8
    round_fp4: RoundFp4
    prepare_linear: PrepareLinear
    linear: Linear
    grouped_linear: GroupedLinear
    rms_norm: RmsNorm
    rotate: Rotate
    window_rows: WindowRows
    write_rows: WriteRows
    hc_map: HcMap
    hc_collapse: HcCollapse
    hc_expand: HcExpand
    pool_groups: PoolGroups
    select_entries: SelectEntries
    sparse_attention: SparseAttention
    block_attention: BlockAttention
    prepare_experts: PrepareExperts
    route: Route
    experts: Experts
    engram_rows: EngramRows
    engram_gate: EngramGate
    adjust_logits: AdjustLogits
    cut_tokens: CutTokens
    draw_tokens: DrawTokens
    rank_tokens: RankTokens


def build_table(backend: str, entries: Mapping[str, Callable[..., Any]]) -> OpTable:
    """Make a table and name what is missing.

    Raises:
        UnsupportedOnBackend: listing the ops without an implementation.
    """
    wanted = [f.name for f in fields(OpTable)]
    missing = [name for name in wanted if name not in entries]
    unknown = sorted(set(entries) - set(wanted))
    assert not unknown, f"backend {backend} implements unknown ops {unknown}"
    if missing:
        raise UnsupportedOnBackend(f"backend {backend} has no implementation of: {', '.join(missing)}")
    return OpTable(**entries)


def explain(table: OpTable) -> list[tuple[str, str]]:
    """(op, who implements it) in the order of the table."""
    rows = []
    for field in fields(table):
        fn = getattr(table, field.name)
        fn = getattr(fn, "__func__", fn)
        rows.append((field.name, f"{fn.__module__}.{fn.__qualname__}"))
    return rows
