"""Attention over a sliding window and selected compressed entries, and that of draft blocks."""

from __future__ import annotations

from typing import Protocol

import torch

from ..core.batch import DraftBatch, ForwardBatch
from .norm_rope import RotaryRows


class SparseAttention(Protocol):
    def __call__(
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
        """One latent per token serves as key and value of all heads; keys from three places share one softmax.

        The row at position p sees window positions max(window_start, p - window + 1) .. p: those of this step in `kv`,
        earlier ones in `ring` at state_slot and position % R; and the compressed entries `selected`. With
        s_i = q . k_i * D^-0.5: o = sum_i exp(s_i) k_i / (exp(sink) + sum_i exp(s_i)). Then the last rope_dim channels of
        each head are rotated back by the row's own position.

        Args:
            q: [T, H, D], rotated.
            kv: [T, D], this step's window rows.
            ring: [slots, R, D], R >= window - 1; holds the positions before this step's rows.
            entries: [entries of all cache blocks, D], or None.
            selected: int32 [T, K] flat indices into `entries`, -1 where unused (at the end only), or None.
            sink: [H].

        Returns:
            [T, H, D].
        """
        ...


class BlockAttention(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        ring: torch.Tensor,
        sink: torch.Tensor,
        batch: DraftBatch,
        window: int,
        rotary: RotaryRows,
    ) -> torch.Tensor:
        """All rows of a draft block see the same keys: the window before its anchor, and the whole block.

        A block that starts at position b sees positions max(0, b - window) .. b - 1 in `ring`, at its state slot and
        position % R, and its own rows in `kv`. Softmax, sink and the rotation back are those of `SparseAttention`.

        Args:
            q: [N * B, H, D], rotated; N blocks of B rows.
            kv: [N * B, D], the blocks' own rows.
            ring: [slots, R, D], R >= window; may hold anything at positions from b on.
            sink: [H].

        Returns:
            [N * B, H, D].
        """
        ...
