"""What all parts of the model share: how weights and caches are reached, the state of one forward, and rotary tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from ..config.engine import Numerics
from ..config.model import TextConfig
from ..core.batch import ForwardBatch
from ..ops.hyper_connection import HyperParams
from ..ops.indexer import Selection
from ..ops.linear import HeldAs, LinearWeight
from ..ops.norm_rope import RotaryRows
from ..ops.registry import OpTable
from ..quant.formats import StoredMatrix


class EngramTable(Protocol):
    """Rows of one Engram table, in memory or on disk."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Decoded rows: int64 [M] -> float32 [M, engram_head_dim]."""
        ...


class Weights(Protocol):
    """Where parameters come from, by checkpoint name."""

    def matrix(self, name: str) -> StoredMatrix:
        """`<name>.weight` with its scale, as stored."""
        ...

    def dense(self, name: str) -> torch.Tensor:
        """A tensor that has no scale, as float32; `name` is complete."""
        ...

    def engram_table(self, name: str) -> EngramTable:
        """`<name>.weight` and its scales, row by row."""
        ...


class Caches(Protocol):
    """Tensors of the cache groups (float32), by owner layer. Filled by the model, handed out by the engine."""

    def window(self, layer: int) -> torch.Tensor:
        """[slots, ring rows, head_dim]; draft stages count on from the last layer."""
        ...

    def entries(self, layer: int) -> torch.Tensor:
        """Compressed KV, [blocks * entries per block, head_dim]."""
        ...

    def index_keys(self, layer: int) -> torch.Tensor:
        """[blocks * entries per block, index_head_dim]."""
        ...

    def partial(self, layer: int) -> torch.Tensor:
        """Rows of unfinished groups, [slots * ring rows, 2, head_dim]: values, gates."""
        ...


@dataclass(frozen=True)
class ModelContext:
    """What every part of the model is built with."""

    config: TextConfig
    numerics: Numerics
    ops: OpTable
    held_as: HeldAs
    weights: Weights
    device: str = "cpu"

    def linear(self, *names: str) -> LinearWeight:
        """The matrices of these names, stacked, as the backend holds them."""
        return self.ops.prepare_linear([self.weights.matrix(name) for name in names], self.held_as)

    def hyper_params(self) -> HyperParams:
        config = self.config
        return HyperParams(config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)

    def round_activations(self, x: torch.Tensor) -> torch.Tensor:
        """The input of an FP8 or FP4 linear as the trained model sees it."""
        return self.ops.round_fp8(x) if self.numerics.activations else x


@dataclass
class StepState:
    """One forward in progress: its inputs, and what layers publish for the layers after them.

    Attributes:
        selection: entries chosen at the last index-source layer.
        candidates: blocks published by the candidate source.
        entries_written: the compressed entries of all rows are in the cache already.
    """

    batch: ForwardBatch
    caches: Caches
    selection: Selection | None = None
    candidates: torch.Tensor | None = None
    entries_written: bool = False


def initial_streams(embed: StoredMatrix, token_ids: torch.Tensor, num_streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams [T, n, C], copies of the embeddings of int32 [T] ids, and weights [T, n] that collapse to the first."""
    h = embed.data[token_ids.long()].float().unsqueeze(1).repeat(1, num_streams, 1)
    pre = h.new_zeros(len(h), num_streams)
    pre[:, 0] = 1.0
    return h, pre


class RotaryTable:
    """Cosines and sines of all positions met so far.

    Grown in fixed spans, so that a position's row never depends on which batch asked first.
    """

    SPAN = 4096

    def __init__(self, inv_freq: torch.Tensor, device: str = "cpu") -> None:
        """`inv_freq` float32 [rope_dim / 2], as the trained model holds it. Made on the host, held on `device`."""
        self._inv_freq, self._device = inv_freq, device
        empty = torch.empty(0, len(inv_freq), device=device)
        self._rows = RotaryRows(empty, empty)

    def upto(self, length: int) -> RotaryRows:
        """Rows of at least the positions 0 .. length - 1."""
        have = len(self._rows.cos)
        if length <= have:
            return self._rows
        parts = [self._rows]
        for start in range(have, length, self.SPAN):
            # the trained model's angles are float32 products; a closer product would be another function at far positions
            angles = (torch.arange(start, start + self.SPAN, dtype=torch.float32).unsqueeze(1) * self._inv_freq).double()
            parts.append(RotaryRows(angles.cos().float().to(self._device), angles.sin().float().to(self._device)))
        self._rows = RotaryRows(torch.cat([p.cos for p in parts]), torch.cat([p.sin for p in parts]))
        return self._rows


def window_inv_freq(config: TextConfig) -> torch.Tensor:
    """Frequencies of the layers without compression: theta^(-2i/d), float32 [rope_dim / 2]."""
    return _inv_freq(config.rope_theta, config.qk_rope_head_dim).float()


def yarn_inv_freq(config: TextConfig) -> torch.Tensor:
    """Frequencies of compressed layers, float32 [rope_dim / 2]: YaRN's ramp between f and f / factor.

    The correction dimension of n rotations is d ln(L / (2 pi n)) / (2 ln theta); the ramp runs from the floor of that of
    `beta_fast` to the ceiling of that of `beta_slow`. Cosines and sines are not scaled (arXiv 2309.00071 without its
    temperature).
    """
    scaling, dim, theta = config.rope_scaling, config.qk_rope_head_dim, config.compress_rope_theta
    freq = _inv_freq(theta, dim)

    def correction(rotations: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (freq * (1 - ramp) + freq / scaling.factor * ramp).float()


def _inv_freq(theta: float, dim: int) -> torch.Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
