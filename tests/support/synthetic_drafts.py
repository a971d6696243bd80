"""Draft blocks from synthetic distributions with the spread of language, and what of them each acceptance rule keeps.

A place of a block has a target distribution p and a draft distribution q over the vocabulary, drawn independently of other
places. The spread goes from one certain token to thousands of possible ones; q is p with noise on its logits that grows from
place to place, as a drafter gets worse the further it looks ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BLOCK_SIZE, VOCAB_SIZE = 5, 2000
SPREADS = (2.0, 12.0)
GROWTH = 0.15
"""Of the noise, from place to place."""

PUBLISHED_NOISE = 0.13
"""At which rejection accepts about 2.5 of 5 drafts, as is published for the released model on code."""


@dataclass(frozen=True)
class Block:
    """Logits float32 [BLOCK_SIZE, VOCAB_SIZE] of the target and of the drafter."""

    target: np.ndarray
    drafter: np.ndarray


def blocks(count: int, noise: float = PUBLISHED_NOISE, seed: int = 0) -> Iterator[Block]:
    """That many blocks, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        target, drafter = [], []
        for place in range(BLOCK_SIZE):
            spread = rng.uniform(*SPREADS)
            target.append(rng.normal(size=VOCAB_SIZE) * spread)
            drafter.append(target[-1] + rng.normal(size=VOCAB_SIZE) * spread * noise * (1 + GROWTH * place))
        yield Block(np.array(target, np.float32), np.array(drafter, np.float32))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities float64 of the last axis."""
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kept_by_rejection(p: np.ndarray, q: np.ndarray) -> float:
    """Probability that a draft from q is kept: sum min(p, q) = 1 - TV."""
    return float(np.minimum(p, q).sum())


def kept_by_coupling(p: np.ndarray, q: np.ndarray) -> float:
    """Probability that p and q draw the same token with the same Gumbel noise: sum_v 1 / sum_w max(p_w / p_v, q_w / q_v).

    Token v wins both draws if its noise beats that of every other w by max(log p_w / p_v, log q_w / q_v), and the highest of
    Gumbel variables with offsets is v with its share of their exponentials.
    """
    order = np.argsort(p / q)
    p, q = p[order], q[order]
    # the first ratio is the larger one for all w from v on in this order, the second one for those before it
    above, below = np.cumsum(p[::-1])[::-1] / p, (np.cumsum(q) - q) / q
    return float((1 / (above + below)).sum())


def least_by_coupling(p: np.ndarray, q: np.ndarray) -> float:
    """What coupling keeps at least: (1 - TV) / (1 + TV)."""
    kept = kept_by_rejection(p, q)
    return kept / (2 - kept)


def accepted_tokens(kept: np.ndarray) -> float:
    """Expected accepted tokens of blocks with these probabilities [blocks, places]: a token counts if all before it do."""
    return float(np.cumprod(kept, axis=1).sum(1).mean())
