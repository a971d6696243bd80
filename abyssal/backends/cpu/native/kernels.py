"""The op table's entries over the native library: allocate the result, pass addresses. Contracts: `abyssal.ops`.

A native function takes one address, of a struct whose members all have 8 bytes. Packing that costs a third of what ctypes
asks for as many arguments, and at one row a call is mostly its arguments.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....core.batch import CompressionPlan, DraftBatch, ForwardBatch
from ....ops.engram import EngramHash
from ....ops.hyper_connection import HyperParams
from ....ops.indexer import Selection, SelectionRule
from ....ops.linear import HeldAs, LinearWeight
from ....ops.moe import ExpertWeights, StoredExpert
from ....ops.norm_rope import RotaryRows
from ....ops.quantize import ScaleFormat
from ....quant.formats import StoredMatrix
from .matrices import PANEL, MatrixArray

SIGNATURES: dict[str, tuple[Any, ...]] = {"abyssal_set_num_threads": (ctypes.c_int64,)}
"""Argument types of the functions that take plain arguments; they return nothing."""

Call = tuple[Callable[[bytes], None], Callable[..., bytes]]
"""A native function and what packs its arguments."""


def bind(library: ctypes.CDLL, name: str, layout: str) -> Call:
    """The function `abyssal_<name>`, whose struct has this layout: P an address or 0, q an integer, d a float."""
    function = library[f"abyssal_{name}"]
    function.argtypes, function.restype = (ctypes.c_char_p,), None
    return function, struct.Struct(layout).pack


class Kernels:
    """The native ops. Tensors must be contiguous, float32, and int32 where indices, as the contracts say."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._round_fp8 = bind(library, "round_fp8", "PqqP")
        self._round_fp4 = bind(library, "round_fp4", "PqqqP")
        self._linear = bind(library, "linear", "PqqPP")
        self._rms_norm = bind(library, "rms_norm", "PqqPdP")
        self._rotate = bind(library, "rotate", "PqqqPPPqP")
        self._window_rows = bind(library, "window_rows", "PqqPdPPPqqP")
        self._write_rows = bind(library, "write_rows", "PqPPPq")
        self._hc_map = bind(library, "hc_map", "PqqPPPqddPPP")
        self._hc_collapse = bind(library, "hc_collapse", "PPqqqPdP")
        self._hc_expand = bind(library, "hc_expand", "PPPPqqqP")
        self._pool_groups = bind(library, "pool_groups", "PPPqPqqPPqP")
        self._select_entries = bind(library, "select_entries", "PPPqqqPPPqqqqqqPqqPqPq")
        self._sparse_attention = bind(library, "sparse_attention", "PqqqPPqPPqPqPPPPPPPqP")
        self._block_attention = bind(library, "block_attention", "PqqqqPPqPqPPPPPqP")
        self._route = bind(library, "route", "PqPPqdPP")
        self._experts = bind(library, "experts", "PqqqPPqPPqdqP")
        self._engram_rows = bind(library, "engram_rows", "PqqqPqPPPP")
        self._engram_gate = bind(library, "engram_gate", "PPPqqqdP")

    def entries(self) -> dict[str, Callable[..., Any]]:
        """All ops by name."""
        return {name: getattr(self, name) for name in NATIVE_OPS}

    def round_fp8(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        call, pack = self._round_fp8
        call(pack(x.data_ptr(), x.numel() // width, width, out.data_ptr()))
        return out

    def round_fp4(self, x: torch.Tensor, group: int, scale: ScaleFormat) -> torch.Tensor:
        assert group == (16 if scale == "e4m3" else 32), f"no kernel for groups of {group} under {scale} scales"
        out = torch.empty_like(x)
        width = x.shape[-1]
        call, pack = self._round_fp4
        call(pack(x.data_ptr(), x.numel() // width, width, scale == "e4m3", out.data_ptr()))
        return out

    def prepare_linear(self, matrices: Sequence[StoredMatrix], held_as: HeldAs) -> LinearWeight:
        array = MatrixArray([matrices], held_as, self._decode_panels)
        return LinearWeight(sum(m.out_features for m in matrices), matrices[0].in_features, array)

    def _decode_panels(self, matrix: int, out: int) -> None:
        call, pack = bind(self._library, "decode_panels", "PP")
        call(pack(matrix, out))

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        rows = x.shape[0]
        out = torch.empty(rows, weight.out_features)
        call, pack = self._linear
        call(pack(x.data_ptr(), rows, 1, weight.handle.address, out.data_ptr()))
        return out

    def grouped_linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        rows, groups, _ = x.shape
        outputs = weight.out_features
        assert outputs % (PANEL * groups) == 0, f"{outputs} outputs do not split into {groups} groups of panels"
        out = torch.empty(rows, outputs)
        call, pack = self._linear
        call(pack(x.data_ptr(), rows, groups, weight.handle.address, out.data_ptr()))
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        call, pack = self._rms_norm
        call(pack(x.data_ptr(), rows, width, weight.data_ptr(), eps, out.data_ptr()))
        return out

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, rotary: RotaryRows) -> torch.Tensor:
        out = torch.empty_like(x)
        shape, cos = x.shape, rotary.cos
        heads = shape[1] if len(shape) == 3 else 1
        call, pack = self._rotate
        call(
            pack(
                x.data_ptr(), shape[0], heads, shape[-1], positions.data_ptr(), cos.data_ptr(), rotary.sin.data_ptr(),
                cos.shape[1], out.data_ptr(),
            )
        )  # fmt: skip
        return out

    def window_rows(
        self, kv: torch.Tensor, weight: torch.Tensor, eps: float, positions: torch.Tensor, rotary: RotaryRows, rounded: bool
    ) -> torch.Tensor:
        out = torch.empty_like(kv)
        rows, width = kv.shape
        cos = rotary.cos
        call, pack = self._window_rows
        call(
            pack(
                kv.data_ptr(), rows, width, weight.data_ptr(), eps, positions.data_ptr(), cos.data_ptr(),
                rotary.sin.data_ptr(), cos.shape[1], rounded, out.data_ptr(),
            )
        )  # fmt: skip
        return out

    def write_rows(
        self, storage: torch.Tensor, dst: torch.Tensor, values: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        call, pack = self._write_rows
        source = 0 if rows is None else rows.data_ptr()
        call(pack(storage.data_ptr(), storage.shape[-1], dst.data_ptr(), values.data_ptr(), source, dst.shape[0]))

    def hc_map(
        self, h: torch.Tensor, fn: LinearWeight, base: torch.Tensor, scale: torch.Tensor, params: HyperParams
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, streams, width = h.shape
        assert streams == 4, f"the kernel mixes 4 streams, not {streams}"
        pre, post, comb = torch.empty(rows, 4), torch.empty(rows, 4), torch.empty(rows, 4, 4)
        call, pack = self._hc_map
        call(
            pack(
                h.data_ptr(), rows, width, fn.handle.address, base.data_ptr(), scale.data_ptr(), params.sinkhorn_iters,
                params.eps, params.norm_eps, pre.data_ptr(), post.data_ptr(), comb.data_ptr(),
            )
        )  # fmt: skip
        return pre, post, comb

    def hc_collapse(self, h: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, streams, width = h.shape
        out = torch.empty(rows, width)
        call, pack = self._hc_collapse
        call(pack(h.data_ptr(), pre.data_ptr(), rows, streams, width, weight.data_ptr(), eps, out.data_ptr()))
        return out

    def hc_expand(self, y: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        rows, streams, width = h.shape
        out = torch.empty_like(h)
        call, pack = self._hc_expand
        call(
            pack(y.data_ptr(), h.data_ptr(), post.data_ptr(), comb.data_ptr(), rows, streams, width, out.data_ptr())
        )  # fmt: skip
        return out

    def pool_groups(
        self, values: torch.Tensor, gates: torch.Tensor, partial: torch.Tensor, plan: CompressionPlan
    ) -> torch.Tensor:
        groups, ratio = plan.source.shape
        width = values.shape[1]
        out = torch.empty(groups, width)
        kept = plan.partial
        call, pack = self._pool_groups
        call(
            pack(
                values.data_ptr(), gates.data_ptr(), partial.data_ptr(), width, plan.source.data_ptr(), groups, ratio,
                kept.rows.data_ptr(), kept.dst.data_ptr(), kept.dst.shape[0], out.data_ptr(),
            )
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
        num_entries, num_blocks = min(rule.topk, most), min(rule.topk_blocks, -(-most // rule.block_size))
        entries = torch.empty(rows, num_entries, dtype=torch.int32)
        blocks = torch.empty(rows, num_blocks, dtype=torch.int32) if rule.publishes else None
        table = batch.block_table
        call, pack = self._select_entries
        call(
            pack(
                q.data_ptr(), weights.data_ptr(), keys.data_ptr(), rows, heads, width, batch.positions.data_ptr(),
                batch.row_to_request.data_ptr(), table.data_ptr(), table.shape[1], rule.ratio, rule.entries_per_block,
                rule.topk, rule.block_size, rule.topk_blocks, 0 if candidates is None else candidates.data_ptr(),
                0 if candidates is None else candidates.shape[1], most, entries.data_ptr(), num_entries,
                0 if blocks is None else blocks.data_ptr(), num_blocks,
            )
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
        cos = rotary.cos
        call, pack = self._sparse_attention
        call(
            pack(
                q.data_ptr(), rows, heads, width, kv.data_ptr(), ring.data_ptr(), ring.shape[1],
                0 if entries is None else entries.data_ptr(), 0 if selected is None else selected.data_ptr(),
                0 if selected is None else selected.shape[1], sink.data_ptr(), window, batch.positions.data_ptr(),
                batch.row_to_request.data_ptr(), batch.query_start.data_ptr(), batch.state_slot.data_ptr(),
                batch.window_start.data_ptr(), cos.data_ptr(), rotary.sin.data_ptr(), cos.shape[1], out.data_ptr(),
            )
        )  # fmt: skip
        return out

    def block_attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        ring: torch.Tensor,
        sink: torch.Tensor,
        batch: DraftBatch,
        window: int,
        rotary: RotaryRows,
    ) -> torch.Tensor:
        rows, heads, width = q.shape
        out = torch.empty_like(q)
        cos = rotary.cos
        call, pack = self._block_attention
        call(
            pack(
                q.data_ptr(), rows, heads, width, rows // max(1, batch.block_start.shape[0]), kv.data_ptr(), ring.data_ptr(),
                ring.shape[1], sink.data_ptr(), window, batch.positions.data_ptr(), batch.block_start.data_ptr(),
                batch.state_slot.data_ptr(), cos.data_ptr(), rotary.sin.data_ptr(), cos.shape[1], out.data_ptr(),
            )
        )  # fmt: skip
        return out

    def prepare_experts(self, routed: Sequence[StoredExpert], shared: StoredExpert, held_as: HeldAs) -> ExpertWeights:
        every = [*routed, shared]
        up = MatrixArray([[e.w1, e.w3] for e in every], held_as, self._decode_panels)
        down = MatrixArray([[e.w2] for e in every], held_as, self._decode_panels)
        return ExpertWeights(len(routed), shared.w1.in_features, shared.w1.out_features, (up, down))

    def route(
        self, x: torch.Tensor, gate: LinearWeight, bias: torch.Tensor, top_k: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.shape[0]
        ids, weights = torch.empty(rows, top_k, dtype=torch.int32), torch.empty(rows, top_k)
        call, pack = self._route
        call(
            pack(
                x.data_ptr(), rows, gate.handle.address, bias.data_ptr(), top_k, scale, ids.data_ptr(), weights.data_ptr()
            )
        )  # fmt: skip
        return ids, weights

    def experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, limit: float, rounded: bool
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        up, down = experts.handle
        call, pack = self._experts
        call(
            pack(
                x.data_ptr(), rows, width, experts.intermediate_size, ids.data_ptr(), weights.data_ptr(), ids.shape[1],
                up.address, down.address, experts.num_routed, limit, rounded, out.data_ptr(),
            )
        )  # fmt: skip
        return out

    def engram_rows(self, ngram_ids: torch.Tensor, hashing: EngramHash) -> torch.Tensor:
        rows, width = ngram_ids.shape
        columns = hashing.primes.shape[0]
        out = torch.empty(rows, columns, dtype=torch.int64)
        call, pack = self._engram_rows
        call(
            pack(
                ngram_ids.data_ptr(), rows, width - 1, columns // (width - 1), hashing.token_map.data_ptr(), hashing.pad,
                hashing.multipliers.data_ptr(), hashing.primes.data_ptr(), hashing.offsets.data_ptr(), out.data_ptr(),
            )
        )  # fmt: skip
        return out

    def engram_gate(self, h: torch.Tensor, key_value: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, streams, width = h.shape
        out = torch.empty_like(h)
        call, pack = self._engram_gate
        call(
            pack(
                h.data_ptr(), key_value.data_ptr(), weight.data_ptr(), rows, streams, width, eps, out.data_ptr()
            )
        )  # fmt: skip
        return out


NATIVE_OPS = (
    "round_fp8", "round_fp4", "prepare_linear", "linear", "grouped_linear", "rms_norm", "rotate", "window_rows",
    "write_rows", "hc_map", "hc_collapse", "hc_expand", "pool_groups", "select_entries", "sparse_attention",
    "block_attention", "prepare_experts", "route", "experts", "engram_rows", "engram_gate",
)  # fmt: skip
