"""Distribution: what a token is drawn from once rules, temperature and filters have had their say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..core.noise import gumbel
from ..core.sampling_params import SamplingParams


@dataclass(frozen=True)
class Distribution:
    """Ids int64 [N], ascending, and their probabilities float64 [N]."""

    ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]

    @classmethod
    def of(cls, kept: npt.NDArray[np.float32], params: SamplingParams) -> Distribution:
        """Of logits float32 [V] with -inf for all that is left out."""
        if params.is_greedy:
            return cls(np.array([kept.argmax()], np.int64), np.ones(1))
        ids = np.flatnonzero(kept > -np.inf)
        scaled = kept[ids].astype(np.float64) / params.temperature
        weights = np.exp(scaled - scaled.max())
        return cls(ids, weights / weights.sum())

    def probability(self, token_id: int) -> float:
        """Of one token; 0 where it was left out."""
        i = int(np.searchsorted(self.ids, token_id))
        found = i < len(self.ids) and self.ids[i] == token_id
        return float(self.probabilities[i]) if found else 0.0

    def minus(self, other: Distribution) -> Distribution:
        """The positive part of the difference, normalised; this one where rounding left nothing of it."""
        taken = np.zeros(len(self.ids))
        place = np.searchsorted(other.ids, self.ids).clip(max=len(other.ids) - 1)
        shared = other.ids[place] == self.ids
        taken[shared] = other.probabilities[place[shared]]
        left = np.maximum(self.probabilities - taken, 0.0)
        total = left.sum()
        return Distribution(self.ids, left / total) if total > 0 else self

    def draw(self, seed: int, position: int, domain: int) -> int:
        """A token, by the noise of that domain."""
        possible = self.probabilities > 0
        ids = self.ids[possible]
        return int(ids[np.argmax(np.log(self.probabilities[possible]) + gumbel(seed, position, ids, domain))])
