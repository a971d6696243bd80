"""HyperConnection: the residual streams around one sublayer.

A site reads the streams, weighs them into the sublayer's input, and spreads its output back. The weights of the input
("pre") are lagged: those computed at a site are used by the next one (see `flash.DecoderLayer`).
"""

from __future__ import annotations

import torch

from .common import ModelContext


class HyperConnection:
    """One site: `hc_<site>_fn`, `_base`, `_scale` and the norm of the sublayer that it wraps."""

    def __init__(self, ctx: ModelContext, prefix: str, site: str) -> None:
        self._ops = ctx.ops
        self._fn = ctx.ops.prepare_linear([ctx.weights.matrix(f"{prefix}.hc_{site}_fn")], ctx.held_as)
        self._base = ctx.weights.dense(f"{prefix}.hc_{site}_base")
        self._scale = ctx.weights.dense(f"{prefix}.hc_{site}_scale")
        self._norm = ctx.weights.dense(f"{prefix}.{site}_norm.weight")
        self._params = ctx.hyper_params()

    def mix(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """pre [T, n] for the next site, post [T, n] and comb [T, n, n] for this one, from h [T, n, C]."""
        return self._ops.hc_map(h, self._fn, self._base, self._scale, self._params)

    def collapse(self, h: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """The sublayer's normed input [T, C]."""
        return self._ops.hc_collapse(h, pre, self._norm, self._params.norm_eps)

    def expand(self, y: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The streams after the sublayer gave y [T, C]."""
        return self._ops.hc_expand(y, h, post, comb)
