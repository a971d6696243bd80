"""How drafts fare: counts by place in the block, and how far their confidences can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

NUM_BINS = 10
MEMORY = 0.95
"""Each judged draft makes earlier ones count by this factor less."""

PRIOR_DRAFTS = 2.0
"""So many accepted drafts are assumed before any was judged, in agreement with their confidences."""

ASSUMED_CONDITIONAL = 0.8
"""Conditional acceptance of a place of which no confidence was seen yet."""


@dataclass(frozen=True)
class PlaceStats:
    """One place in the block, counted from the start of the engine.

    Attributes:
        drafted, verified, accepted: tokens. A verified token counts as accepted if it and all before it were kept.
        calibration_error: expected calibration error of the confidence that all tokens up to this place are accepted, over
            verified tokens, 0 to 1; None without any.
    """

    drafted: int
    verified: int
    accepted: int
    calibration_error: float | None


@dataclass(frozen=True)
class SpeculationStats:
    """Figures of drafting.

    Attributes:
        num_steps: steps of requests (one request in one step) that drew tokens after its first one.
        num_tokens: tokens drawn in them.
        places: by place in the block.
    """

    num_steps: int
    num_tokens: int
    places: tuple[PlaceStats, ...]

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens of a request in a step; None before the first."""
        return self.num_tokens / self.num_steps if self.num_steps else None


class Reliability:
    """Expected against observed shares, in ten bins of equal width."""

    def __init__(self) -> None:
        self._counts = [0] * NUM_BINS
        self._expected = [0.0] * NUM_BINS
        self._observed = [0] * NUM_BINS

    def add(self, expected: float, observed: bool) -> None:
        """One event that was expected with that probability."""
        i = min(int(expected * NUM_BINS), NUM_BINS - 1)
        self._counts[i] += 1
        self._expected[i] += expected
        self._observed[i] += observed

    @property
    def error(self) -> float | None:
        """Mean over events of |expected - observed| of their bin; None without events."""
        total = sum(self._counts)
        if not total:
            return None
        return sum(abs(e - o) for e, o in zip(self._expected, self._observed, strict=True)) / total


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)), for any logit."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    return math.exp(logit) / (1.0 + math.exp(logit))


def survivals(conditional: Sequence[float]) -> list[float]:
    """Probability that all tokens up to each place are accepted, from that of each if those before it were."""
    return list(accumulate(conditional, mul))


class Acceptance:
    """Confidence logits to probabilities, corrected by what became of earlier drafts.

    The temperatures were fitted on other text. What is seen while running corrects them: for each place, the share of judged
    drafts that were accepted over the mean of their probabilities, with a memory of some twenty drafts.

    Args:
        temperatures: one for each place in the block.
    """

    def __init__(self, temperatures: Sequence[float]) -> None:
        self.block_size = len(temperatures)
        self._temperatures = tuple(temperatures)
        self._expected = [PRIOR_DRAFTS] * self.block_size
        self._accepted = [PRIOR_DRAFTS] * self.block_size
        self._mean = [ASSUMED_CONDITIONAL] * self.block_size
        self._counts = [[0] * self.block_size for _ in range(3)]
        self._reliability = [Reliability() for _ in range(self.block_size)]
        self._num_steps = self._num_tokens = 0

    @property
    def num_judged(self) -> int:
        """Drafts of the first place that were verified."""
        return self._counts[1][0]

    def conditional(self, logits: Sequence[float]) -> list[float]:
        """Probability that each draft is accepted if those before it are."""
        return [self._corrected(k, self._probability(k, logit)) for k, logit in enumerate(logits)]

    def typical(self, length: int) -> list[float]:
        """The same for drafts of which nothing is known yet, from earlier ones."""
        return [self._corrected(k, self._mean[k]) for k in range(length)]

    def record_drafted(self, logits: Sequence[float]) -> None:
        """Drafts were made."""
        for k in range(len(logits)):
            self._counts[0][k] += 1

    def record_verified(self, logits: Sequence[float], num_verified: int, num_accepted: int) -> None:
        """Of a request's drafts, the first `num_verified` were compared, and the first `num_accepted` of them kept.

        Only now do their confidences enter the means: those of drafts at hand must not be seen by what decides on them.
        """
        self._num_steps += 1
        self._num_tokens += num_accepted + 1
        for k, logit in enumerate(logits):
            self._mean[k] += (1 - MEMORY) * (self._probability(k, logit) - self._mean[k])
        survival = 1.0
        for k in range(num_verified):
            probability = self._probability(k, logits[k])
            survival *= probability
            self._counts[1][k] += 1
            self._counts[2][k] += k < num_accepted
            self._reliability[k].add(survival, k < num_accepted)
            if k <= num_accepted:
                self._expected[k] = MEMORY * self._expected[k] + probability
                self._accepted[k] = MEMORY * self._accepted[k] + (k < num_accepted)

    def stats(self) -> SpeculationStats:
        """Figures so far."""
        counts = zip(*self._counts, self._reliability, strict=True)
        places = tuple(PlaceStats(d, v, a, reliability.error) for d, v, a, reliability in counts)
        return SpeculationStats(self._num_steps, self._num_tokens, places)

    def _probability(self, place: int, logit: float) -> float:
        return sigmoid(logit / self._temperatures[place])

    def _corrected(self, place: int, probability: float) -> float:
        return min(1.0, probability * self._accepted[place] / max(self._expected[place], 1e-9))
