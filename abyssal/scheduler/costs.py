"""What a step costs: seconds by rows and by requests, measured at start-up and corrected by the steps that follow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ..core.batch import StepTiming

WEIGHT = 0.1
"""Share of a new observation in a running mean."""

MAX_JUMP = 2.0
"""An observation further off than this factor (another process took the machine) counts as this far off."""


def rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls, by squares: neighbours that fall are pooled into their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


class CostCurve:
    """Seconds by a number of items: linear between measured points. Neighbours of which the larger is faster share a mean.

    Each point carries a factor that follows what is observed nearest to it; points that were not observed yet follow the
    mean of all. So growing contexts, which slow all steps down alike, are learned from whichever steps are run.
    """

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """`points`: (items, seconds) as measured, at least one, with different positive numbers of items."""
        assert points, "a cost curve needs a measured point"
        ordered = sorted(points)
        self._counts = [count for count, _ in ordered]
        self._measured = rising([seconds for _, seconds in ordered])
        self._factors: list[float | None] = [None] * len(ordered)
        self._factor = 1.0
        self._values = list(self._measured)

    def seconds(self, count: int) -> float:
        """Expected seconds for `count` items. Beyond the last point the last slope goes on."""
        counts, values = self._counts, self._values
        if count <= counts[0]:
            return values[0]
        if len(counts) == 1:
            return values[0] * count / counts[0]
        i = min(bisect_left(counts, count), len(counts) - 1)
        share = (count - counts[i - 1]) / (counts[i] - counts[i - 1])
        return values[i - 1] + share * (values[i] - values[i - 1])

    def observe(self, count: int, seconds: float) -> None:
        """A step of `count` items took that long."""
        expected = self.seconds(count)
        if expected <= 0 or seconds <= 0:
            return
        i = self._nearest(count)
        known = self._factors[i]
        factor = self._factor if known is None else known
        seen = factor * min(max(seconds / expected, 1 / MAX_JUMP), MAX_JUMP)
        self._factor += WEIGHT * (seen - self._factor)
        self._factors[i] = factor + WEIGHT * (seen - factor)
        factors = (self._factor if own is None else own for own in self._factors)
        self._values = rising([value * own for value, own in zip(self._measured, factors, strict=True)])

    def _nearest(self, count: int) -> int:
        i = min(bisect_left(self._counts, count), len(self._counts) - 1)
        if i > 0 and count - self._counts[i - 1] < self._counts[i] - count:
            return i - 1
        return i


class StepCosts:
    """All that a step costs.

    Args:
        forward: (rows, seconds) of the target model.
        drafting: (requests, seconds) of drafting a whole block for each.
        sampling: seconds for each token drawn.
    """

    def __init__(
        self, forward: Sequence[tuple[int, float]], drafting: Sequence[tuple[int, float]], sampling: float = 0.0
    ) -> None:
        self._forward, self._drafting, self._sampling = CostCurve(forward), CostCurve(drafting), sampling

    def seconds(self, num_rows: int, num_tokens: float) -> float:
        """A step of `num_rows` rows out of which `num_tokens` tokens are drawn, without drafting."""
        return self._forward.seconds(num_rows) + self._sampling * num_tokens

    def drafting_seconds(self, num_requests: int) -> float:
        """Drafting for that many requests."""
        return self._drafting.seconds(num_requests) if num_requests else 0.0

    def observe(self, timing: StepTiming, num_rows: int, num_tokens: int, num_drafting: int) -> None:
        """Take in a step that had no rows of prompts."""
        self._forward.observe(num_rows, timing.forward)
        if num_tokens:
            self._sampling += WEIGHT * (timing.sampling / num_tokens - self._sampling)
        if num_drafting:
            self._drafting.observe(num_drafting, timing.drafting)
