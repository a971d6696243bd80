"""Sampler: from logits to tokens, row by row independent of the rest of the batch.

Order: temperature, min-p, top-k, top-p (over what top-k kept, renormalised), then the draw: the highest of scaled logit plus
noise (Gumbel-max), which samples the kept distribution exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..core.batch import SampledToken, TokenLogprobs
from ..core.sampling_params import SamplingParams
from .noise import gumbel

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SamplingRow:
    """How one row of logits is sampled: `position` is that of the token to be drawn."""

    params: SamplingParams
    seed: int
    position: int


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | str]:
    """Draw a token for each row of logits float32 [M, V]; a reason instead where the logits are not numbers."""
    array = logits.numpy()
    results: list[SampledToken | str] = []
    for row_logits, row in zip(array, rows, strict=True):
        if not np.isfinite(row_logits).all():
            results.append("the model produced logits that are not finite numbers")
            continue
        token = draw(row_logits, row)
        wanted = row.params.logprobs
        results.append(SampledToken(token, None if wanted is None else token_logprobs(row_logits, token, wanted)))
    return results


def draw(logits: Floats, row: SamplingRow) -> int:
    """The token of one row, logits float32 [V]."""
    if row.params.is_greedy:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / row.params.temperature
    ids = support(scaled, row.params)
    return int(ids[np.argmax(scaled[ids] + gumbel(row.seed, row.position, ids))])


def support(scaled: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.int64]:
    """Ids that may be drawn from scaled logits float64 [V], ascending. Never empty."""
    vocab = len(scaled)
    limit_k = params.top_k if 0 < params.top_k < vocab else vocab
    ids = np.arange(vocab)
    if params.min_p > 0:
        ids = ids[scaled >= scaled.max() + np.log(params.min_p)]
    if limit_k == vocab and params.top_p >= 1.0:
        return ids
    order = best_first(scaled, ids, limit_k if params.top_p >= 1.0 else None)[:limit_k]
    if params.top_p < 1.0:
        mass = np.exp(scaled[order] - scaled[order[0]])
        before = np.cumsum(mass) - mass
        order = order[before < params.top_p * mass.sum()]
    return np.sort(order)


def best_first(
    values: npt.NDArray[np.floating], ids: npt.NDArray[np.int64], count: int | None = None
) -> npt.NDArray[np.int64]:
    """`ids` (ascending) ordered by descending value, lowest id first on ties; only the first `count` if given."""
    if count is not None and count < len(ids):
        kth = np.partition(values[ids], len(ids) - count)[len(ids) - count]
        ids = ids[values[ids] >= kth]
    ordered = ids[np.argsort(-values[ids], kind="stable")]
    return ordered if count is None else ordered[:count]


def token_logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of raw logits float32 [V]: the chosen token's, its rank, and the `num_top` best."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    total = peak + np.log(np.exp(wide - peak).sum())
    best = best_first(logits, np.arange(len(logits)), num_top) if num_top else ()
    rank = 1 + int((logits > logits[token_id]).sum()) + int((logits[:token_id] == logits[token_id]).sum())
    top = tuple((int(i), float(np.float32(wide[i] - total))) for i in best)
    return TokenLogprobs(token_id, float(np.float32(wide[token_id] - total)), rank, top)
