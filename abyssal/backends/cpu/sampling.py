"""Sampling in numpy, row by row. Contracts: `abyssal.ops.sampling`."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from ...core.noise import gumbel
from ...ops.sampling import MASS_ONE, Cuts, Filters, LogitAdjustments

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

NO_MASS_BELOW = -31.0
"""exp of this and MASS_ONE make less than 1."""

LARGEST = float(np.finfo(np.float32).max)

_EXP_TERMS = 11
_LOG2_E = 1.0 / math.log(2.0)
_LN2_HIGH = float(np.float32(math.log(2.0)))
_LN2_LOW = math.log(2.0) - _LN2_HIGH


def exp(x: Doubles) -> Doubles:
    """e^x for float64 in [-700, 0] to within 2^-46 of itself, from additions and multiplications in a fixed order."""
    k = np.floor(x * _LOG2_E + 0.5)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = np.full_like(r, 1.0 / math.factorial(_EXP_TERMS))
    for term in range(_EXP_TERMS - 1, -1, -1):
        series = series * r + 1.0 / math.factorial(term)
    result: Doubles = np.ldexp(series, k.astype(np.int32))
    return result


def adjust_logits(logits: torch.Tensor, rows: torch.Tensor, adjustments: LogitAdjustments) -> torch.Tensor:
    out = logits[rows.long()]
    out.masked_fill_(~out.isfinite(), torch.nan)
    where = (adjustments.rows.long(), adjustments.ids.long())
    value = out[where]
    value = torch.where(value > 0, value / adjustments.divisor, value * adjustments.divisor)
    out[where] = ((value - adjustments.minus) + adjustments.plus).clamp(-LARGEST, LARGEST)
    array, masks = out.numpy(), adjustments.masks.numpy()
    covered = min(array.shape[1], masks.shape[1] * 32)
    for row, words in zip(adjustments.masked.tolist(), masks, strict=True):
        allowed = np.unpackbits(words.view(np.uint8), count=covered, bitorder="little").view(np.bool_)
        np.copyto(array[row, :covered], -np.inf, where=~allowed & ~np.isnan(array[row, :covered]))
        np.copyto(array[row, covered:], -np.inf, where=~np.isnan(array[row, covered:]))
    return out


def cut_tokens(logits: torch.Tensor, rows: torch.Tensor, filters: Filters) -> Cuts:
    array = logits.numpy()
    columns = (filters.temperature, filters.top_k, filters.top_p, filters.min_log_ratio, filters.joint)
    cuts = [_cut(array[row], *rest) for row, *rest in zip(rows.tolist(), *(c.tolist() for c in columns), strict=True)]
    values = torch.tensor([value for value, _ in cuts], dtype=torch.float32)
    return Cuts(values, torch.tensor([token_id for _, token_id in cuts], dtype=torch.int32))


def _cut(
    logits: Floats, temperature: float, top_k: int, top_p: float, min_log_ratio: float, joint: bool
) -> tuple[float, int]:
    everything = (-math.inf, -1)
    if temperature == 0.0 or not logits.max() < math.inf:
        return everything
    scaled = logits.astype(np.float64) / temperature
    peak = scaled.max()
    ids = np.flatnonzero((scaled >= peak + min_log_ratio) & (logits > -np.inf))
    if not len(ids) or (top_k >= len(ids) and top_p >= 1.0 and min_log_ratio == -math.inf):
        return everything
    order = best_first(logits, ids, top_k)
    if top_p < 1.0:
        mass = _mass(scaled[order] - peak)
        total = int((_mass(scaled[ids] - peak) if joint else mass).sum())
        before = np.cumsum(mass) - mass
        order = order[: np.searchsorted(before, math.ceil(top_p * float(total)))]
    return float(logits[order[-1]]), int(order[-1])


def _mass(z: Doubles) -> npt.NDArray[np.int64]:
    mass = np.zeros(len(z), np.int64)
    weighs = z > NO_MASS_BELOW
    mass[weighs] = (exp(z[weighs]) * MASS_ONE).astype(np.int64)
    return mass


def best_first(values: Floats, ids: Ids, count: int) -> Ids:
    """The first `count` of `ids` (ascending) by descending value, lowest id first on ties."""
    if 0 < count < len(ids):
        kth = np.partition(values[ids], len(ids) - count)[len(ids) - count]
        ids = ids[values[ids] >= kth]
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def kept_tokens(logits: Floats, value: float, token_id: int) -> npt.NDArray[np.bool_]:
    """bool [V]: which tokens of a row a cut keeps."""
    kept: npt.NDArray[np.bool_] = (logits > value) | ((logits == value) & (np.arange(len(logits)) <= token_id))
    return kept


def draw_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    cuts: Cuts,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    masked: bool,
) -> torch.Tensor:
    array = logits.numpy()
    columns = (c.tolist() for c in (rows, temperature, cuts.values, cuts.ids, seeds, positions))
    drawn = [
        _draw(array[row], own_temperature, (value, token_id), (seed, position), masked)
        for row, own_temperature, value, token_id, seed, position in zip(*columns, strict=True)
    ]
    return torch.tensor(drawn, dtype=torch.int64)


def _draw(logits: Floats, temperature: float, cut: tuple[float, int], key: tuple[int, int], masked: bool) -> int:
    bad = np.isnan(logits).any() or logits.max() == np.inf or (not masked and logits.min() == -np.inf)
    if bad or logits.max() == -np.inf:
        return -1
    if temperature == 0.0:
        return int(logits.argmax())
    ids = np.flatnonzero(kept_tokens(logits, *cut))
    scaled = logits[ids].astype(np.float64) / temperature
    return int(ids[np.argmax(scaled + gumbel(*key, ids))])


def rank_tokens(
    logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen, ranks = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int32)
    top_ids, top = torch.empty(len(rows), num_top, dtype=torch.int32), torch.empty(len(rows), num_top)
    columns = (rows, temperature, ids)
    for i, (row, own_temperature, token_id) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        values = logits[row].numpy()
        if not -np.inf < values.max() < np.inf:
            chosen[i], ranks[i], top_ids[i], top[i] = math.nan, 0, -1, math.nan
            continue
        scaled = values.astype(np.float64) / own_temperature
        peak = scaled.max()
        total = peak + math.log(float(np.exp(scaled - peak).sum()))
        best = best_first(values, np.arange(len(values)), num_top)
        above, equal = values > values[token_id], values[:token_id] == values[token_id]
        chosen[i], ranks[i] = scaled[token_id] - total, 1 + int(above.sum()) + int(equal.sum())
        top_ids[i], top[i] = torch.from_numpy(best), torch.from_numpy(scaled[best] - total)
    return chosen, ranks, top_ids, top
