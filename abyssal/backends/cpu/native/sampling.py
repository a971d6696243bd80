"""Sampling over the native library. Contracts: `abyssal.ops.sampling`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ....ops.sampling import Cuts, Filters, LogitAdjustments

_P, _I = ctypes.c_void_p, ctypes.c_int64

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "abyssal_adjust_logits": (_P, _I, _P, _I, *(_P,) * 5, _I, _P, _I, _P, _I, _P),
    "abyssal_cut_tokens": (_P, _I, _P, _I, *(_P,) * 7),
    "abyssal_draw_tokens": (_P, _I, _P, _I, *(_P,) * 5, _I, _P),
    "abyssal_rank_tokens": (_P, _I, _P, _I, _P, _P, _I, *(_P,) * 4),
}
"""Argument types of every function; all return nothing."""


class SamplingKernels:
    """The native sampling ops as methods of the library's wrapper."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def entries(self) -> dict[str, Callable[..., Any]]:
        """All ops by name."""
        names = ("adjust_logits", "cut_tokens", "draw_tokens", "rank_tokens")
        return {name: getattr(self, name) for name in names}

    def adjust_logits(self, logits: torch.Tensor, rows: torch.Tensor, adjustments: LogitAdjustments) -> torch.Tensor:
        a = adjustments
        out = torch.empty(len(rows), logits.shape[1])
        self._library.abyssal_adjust_logits(
            *_rows(logits, rows), a.rows.data_ptr(), a.ids.data_ptr(), a.divisor.data_ptr(), a.minus.data_ptr(),
            a.plus.data_ptr(), len(a.rows), a.masked.data_ptr(), len(a.masked), a.masks.data_ptr(), a.masks.shape[1],
            out.data_ptr(),
        )  # fmt: skip
        return out

    def cut_tokens(self, logits: torch.Tensor, rows: torch.Tensor, filters: Filters) -> Cuts:
        cuts = Cuts(torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int32))
        self._library.abyssal_cut_tokens(
            *_rows(logits, rows), filters.temperature.data_ptr(), filters.top_k.data_ptr(), filters.top_p.data_ptr(),
            filters.min_log_ratio.data_ptr(), filters.joint.data_ptr(), cuts.values.data_ptr(), cuts.ids.data_ptr(),
        )  # fmt: skip
        return cuts

    def draw_tokens(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        cuts: Cuts,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        masked: bool,
    ) -> torch.Tensor:
        out = torch.empty(len(rows), dtype=torch.int64)
        self._library.abyssal_draw_tokens(
            *_rows(logits, rows), temperature.data_ptr(), cuts.values.data_ptr(), cuts.ids.data_ptr(), seeds.data_ptr(),
            positions.data_ptr(), masked, out.data_ptr(),
        )  # fmt: skip
        return out

    def rank_tokens(
        self, logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen, ranks = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int32)
        top_ids, top = torch.empty(len(rows), num_top, dtype=torch.int32), torch.empty(len(rows), num_top)
        self._library.abyssal_rank_tokens(
            *_rows(logits, rows), temperature.data_ptr(), ids.data_ptr(), num_top, chosen.data_ptr(), ranks.data_ptr(),
            top_ids.data_ptr(), top.data_ptr(),
        )  # fmt: skip
        return chosen, ranks, top_ids, top


def _rows(logits: torch.Tensor, rows: torch.Tensor) -> tuple[int, int, int, int]:
    """The first arguments of every function."""
    assert logits.is_contiguous(), "logits must be contiguous"
    return logits.data_ptr(), logits.shape[1], rows.data_ptr(), len(rows)
