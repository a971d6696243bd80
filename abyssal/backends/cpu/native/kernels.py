"""The op table's entries over the native library: allocate the result, pass addresses. Contracts: `abyssal.ops`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....core.batch import CompressionPlan, ForwardBatch
from ....ops.engram import EngramHash
from ....ops.hyper_connection import HyperParams
from ....ops.indexer import Selection, SelectionRule
from ....ops.linear import HeldAs, LinearWeight
from ....ops.moe import ExpertWeights, StoredExpert
from ....ops.norm_rope import RotaryRows
from ....ops.quantize import ScaleFormat
from .matrices import MatrixArray

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "abyssal_set_num_threads": (_I,),
    "abyssal_decode_panels": (_P, _P),
    "abyssal_linear": (_P, _I, _I, _P, _P),
    "abyssal_round_fp8": (_P, _I, _I, _P),
    "abyssal_round_fp4": (_P, _I, _I, _I, _P),
    "abyssal_rms_norm": (_P, _I, _I, _P, _F, _P),
    "abyssal_rotate": (_P, _I, _I, _I, _P, _P, _P, _I, _P),
    "abyssal_window_rows": (_P, _I, _I, _P, _F, _P, _P, _P, _I, _I, _P),
    "abyssal_write_rows": (_P, _I, _P, _P, _P, _I),
    "abyssal_hc_map": (_P, _I, _I, _P, _P, _P, _I, _F, _F, _P, _P, _P),
    "abyssal_hc_collapse": (_P, _P, _I, _I, _I, _P, _F, _P),
    "abyssal_hc_expand": (_P, _P, _P, _P, _I, _I, _I, _P),
    "abyssal_pool_groups": (_P, _P, _P, _I, _P, _I, _I, _P, _P, _I, _P),
    "abyssal_select_entries": (_P, _P, _P, *(_I,) * 3, *(_P,) * 3, *(_I,) * 6, _P, _I, _I, _P, _I, _P, _I),
    "abyssal_sparse_attention": (_P, _P, _P, _I, _P, _P, _I, _P, *(_I,) * 4, *(_P,) * 5, _P, _P, _I, _P),
    "abyssal_pick_experts": (_P, _P, _I, _I, _I, _F, _P, _P),
    "abyssal_experts": (_P, _I, _I, _I, _P, _P, _I, _P, _P, _I, _F, _I, _P, _P, _P),
    "abyssal_engram_rows": (_P, _I, _I, _I, _P, _I, _P, _P, _P, _P),
    "abyssal_engram_gate": (_P, _P, _P, _I, _I, _I, _F, _P),
}
"""Argument types of every function; all return nothing."""


class Kernels:
    """The native ops as methods of the library's wrapper."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def entries(self) -> dict[str, Callable[..., Any]]:
        """All ops by name."""
        return {name: getattr(self, name) for name in NATIVE_OPS}

    def round_fp8(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._library.abyssal_round_fp8(x.data_ptr(), x.numel() // width, width, out.data_ptr())
        return out

    def round_fp4(self, x: torch.Tensor, group: int, scale: ScaleFormat) -> torch.Tensor:
        assert group == (16 if scale == "e4m3" else 32), f"no kernel for groups of {group} under {scale} scales"
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._library.abyssal_round_fp4(x.data_ptr(), x.numel() // width, width, scale == "e4m3", out.data_ptr())
        return out

    def prepare_linear(self, matrices: Sequence[Any], held_as: HeldAs) -> LinearWeight:
        array = MatrixArray([matrices], held_as, self._library)
        return LinearWeight(sum(m.out_features for m in matrices), matrices[0].in_features, array)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        out = torch.empty(x.shape[0], weight.out_features)
        self._library.abyssal_linear(x.data_ptr(), x.shape[0], 1, weight.handle.address, out.data_ptr())
        return out

    def grouped_linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        rows, groups = x.shape[0], x.shape[1]
        assert weight.out_features % (16 * groups) == 0, (
            f"{weight.out_features} outputs do not split into {groups} groups of panels"
        )
        out = torch.empty(rows, weight.out_features)
        self._library.abyssal_linear(x.data_ptr(), rows, groups, weight.handle.address, out.data_ptr())
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        self._library.abyssal_rms_norm(x.data_ptr(), rows, width, weight.data_ptr(), eps, out.data_ptr())
        return out

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, rotary: RotaryRows) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape[0], x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        cos, sin = rotary.cos, rotary.sin
        self._library.abyssal_rotate(
            x.data_ptr(),
            rows,
            heads,
            width,
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            out.data_ptr(),
        )
        return out

    def window_rows(
        self, kv: torch.Tensor, weight: torch.Tensor, eps: float, positions: torch.Tensor, rotary: RotaryRows, rounded: bool
    ) -> torch.Tensor:
        out = torch.empty_like(kv)
        rows, width = kv.shape
        cos, sin = rotary.cos, rotary.sin
        self._library.abyssal_window_rows(
            kv.data_ptr(), rows, width, weight.data_ptr(), eps, positions.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            cos.shape[1], rounded, out.data_ptr(),
        )  # fmt: skip
        return out

    def write_rows(
        self, storage: torch.Tensor, dst: torch.Tensor, values: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        source = None if rows is None else rows.data_ptr()
        self._library.abyssal_write_rows(
            storage.data_ptr(), storage.shape[-1], dst.data_ptr(), values.data_ptr(), source, dst.shape[0]
        )

    def hc_map(
        self, h: torch.Tensor, fn: LinearWeight, base: torch.Tensor, scale: torch.Tensor, params: HyperParams
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, streams, width = h.shape
        assert streams == 4, f"the kernel mixes 4 streams, not {streams}"
        pre, post, comb = torch.empty(rows, 4), torch.empty(rows, 4), torch.empty(rows, 4, 4)
        self._library.abyssal_hc_map(
            h.data_ptr(), rows, width, fn.handle.address, base.data_ptr(), scale.data_ptr(), params.sinkhorn_iters,
            params.eps, params.norm_eps, pre.data_ptr(), post.data_ptr(), comb.data_ptr(),
        )  # fmt: skip
        return pre, post, comb

    def hc_collapse(self, h: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, streams, width = h.shape
        out = torch.empty(rows, width)
        self._library.abyssal_hc_collapse(
            h.data_ptr(), pre.data_ptr(), rows, streams, width, weight.data_ptr(), eps, out.data_ptr()
        )
        return out

    def hc_expand(self, y: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        rows, streams, width = h.shape
        out = torch.empty_like(h)
        self._library.abyssal_hc_expand(
            y.data_ptr(), h.data_ptr(), post.data_ptr(), comb.data_ptr(), rows, streams, width, out.data_ptr()
        )
        return out

    def pool_groups(
        self, values: torch.Tensor, gates: torch.Tensor, partial: torch.Tensor, plan: CompressionPlan
    ) -> torch.Tensor:
        groups, ratio = plan.source.shape
        width = values.shape[1]
        out = torch.empty(groups, width)
        kept = plan.partial
        self._library.abyssal_pool_groups(
            values.data_ptr(), gates.data_ptr(), partial.data_ptr(), width, plan.source.data_ptr(), groups, ratio,
            kept.rows.data_ptr(), kept.dst.data_ptr(), kept.dst.shape[0], out.data_ptr(),
        )  # fmt: skip
        return out

    def select_entries(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        batch: ForwardBatch,
        rule: SelectionRule,
        candidates: torch.Tensor | None,
    ) -> Selection:
        rows, heads, width = q.shape
        assert heads <= 64, f"the kernel scores up to 64 heads, not {heads}"
        most = batch.max_context // rule.ratio
        entries = torch.full((rows, min(rule.topk, most)), -1, dtype=torch.int32)
        num_blocks = min(rule.topk_blocks, -(-most // rule.block_size))
        blocks = torch.full((rows, num_blocks), -1, dtype=torch.int32) if rule.publishes else None
        table = batch.block_table
        self._library.abyssal_select_entries(
            q.data_ptr(), weights.data_ptr(), keys.data_ptr(), rows, heads, width, batch.positions.data_ptr(),
            batch.row_to_request.data_ptr(), table.data_ptr(), table.shape[1], rule.ratio, rule.entries_per_block, rule.topk,
            rule.block_size, rule.topk_blocks, None if candidates is None else candidates.data_ptr(),
            0 if candidates is None else candidates.shape[1], most, entries.data_ptr(), entries.shape[1],
            None if blocks is None else blocks.data_ptr(), num_blocks,
        )  # fmt: skip
        return Selection(entries, blocks)

    def sparse_attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        ring: torch.Tensor,
        entries: torch.Tensor | None,
        selected: torch.Tensor | None,
        sink: torch.Tensor,
        batch: ForwardBatch,
        window: int,
        rotary: RotaryRows,
    ) -> torch.Tensor:
        rows, heads, width = q.shape
        out = torch.empty_like(q)
        cos, sin = rotary.cos, rotary.sin
        self._library.abyssal_sparse_attention(
            q.data_ptr(), kv.data_ptr(), ring.data_ptr(), ring.shape[1], None if entries is None else entries.data_ptr(),
            None if selected is None else selected.data_ptr(), 0 if selected is None else selected.shape[1],
            sink.data_ptr(), rows, heads, width, window, batch.positions.data_ptr(), batch.row_to_request.data_ptr(),
            batch.query_start.data_ptr(), batch.state_slot.data_ptr(), batch.window_start.data_ptr(), cos.data_ptr(),
            sin.data_ptr(), cos.shape[1], out.data_ptr(),
        )  # fmt: skip
        return out

    def prepare_experts(self, routed: Sequence[StoredExpert], shared: StoredExpert, held_as: HeldAs) -> ExpertWeights:
        every = [*routed, shared]
        up = MatrixArray([[e.w1, e.w3] for e in every], held_as, self._library)
        down = MatrixArray([[e.w2] for e in every], held_as, self._library)
        return ExpertWeights(len(routed), shared.w1.in_features, shared.w1.out_features, (up, down))

    def route(
        self, x: torch.Tensor, gate: LinearWeight, bias: torch.Tensor, top_k: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.linear(x, gate)
        rows, experts = logits.shape
        ids, weights = torch.empty(rows, top_k, dtype=torch.int32), torch.empty(rows, top_k)
        self._library.abyssal_pick_experts(
            logits.data_ptr(), bias.data_ptr(), rows, experts, top_k, scale, ids.data_ptr(), weights.data_ptr()
        )
        return ids, weights

    def experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, limit: float, rounded: bool
    ) -> torch.Tensor:
        x = self.round_fp8(x) if rounded else x
        rows, width = x.shape
        top_k, inner = ids.shape[1], experts.intermediate_size
        up, down = experts.handle
        pairs = rows * (top_k + 1)
        hidden, parts, out = torch.empty(pairs, 2 * inner), torch.empty(pairs, width), torch.empty(rows, width)
        self._library.abyssal_experts(
            x.data_ptr(), rows, width, inner, ids.data_ptr(), weights.data_ptr(), top_k, up.address, down.address,
            experts.num_routed, limit, rounded, hidden.data_ptr(), parts.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def engram_rows(self, ngram_ids: torch.Tensor, hashing: EngramHash) -> torch.Tensor:
        rows, orders = ngram_ids.shape[0], ngram_ids.shape[1] - 1
        columns = len(hashing.primes)
        out = torch.empty(rows, columns, dtype=torch.int64)
        self._library.abyssal_engram_rows(
            ngram_ids.data_ptr(), rows, orders, columns // orders, hashing.token_map.data_ptr(), hashing.pad,
            hashing.multipliers.data_ptr(), hashing.primes.data_ptr(), hashing.offsets.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def engram_gate(self, h: torch.Tensor, key_value: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, streams, width = h.shape
        out = torch.empty_like(h)
        self._library.abyssal_engram_gate(
            h.data_ptr(), key_value.data_ptr(), weight.data_ptr(), rows, streams, width, eps, out.data_ptr()
        )
        return out


NATIVE_OPS = (
    "round_fp8", "round_fp4", "prepare_linear", "linear", "grouped_linear", "rms_norm", "rotate", "window_rows",
    "write_rows", "hc_map", "hc_collapse", "hc_expand", "pool_groups", "select_entries", "sparse_attention",
    "prepare_experts", "route", "experts", "engram_rows", "engram_gate",
)  # fmt: skip
