"""Fits the temperatures of the confidence head: sequential temperature scaling.

Place by place, in order: the temperature of place k makes the probability that all drafts up to k are accepted, the product
of the calibrated ones before it and its own, as reliable as it can be (smallest expected calibration error).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .acceptance import Reliability, sigmoid

TEMPERATURES = tuple(10 ** (i / 20 - 1) for i in range(41))
"""Candidates, 0.1 to 10. Where several are equally good, the one nearest to 1 is taken."""


@dataclass(frozen=True)
class JudgedDraft:
    """One verified block: the confidence logits of its verified tokens, and how many of them were accepted."""

    logits: tuple[float, ...]
    num_accepted: int


@dataclass(frozen=True)
class Calibration:
    """What was fitted, by place.

    Attributes:
        num_drafts: verified tokens that it was fitted on.
        error_before, error_after: expected calibration error at temperature 1 and as fitted; None without drafts.
    """

    temperatures: tuple[float, ...]
    num_drafts: tuple[int, ...]
    error_before: tuple[float | None, ...]
    error_after: tuple[float | None, ...]


def fit_temperatures(drafts: Sequence[JudgedDraft], block_size: int) -> Calibration:
    """Fit one temperature for each place; 1 where nothing was verified."""
    temperatures: list[float] = []
    counts: list[int] = []
    before: list[float | None] = []
    after: list[float | None] = []
    # probability that all before this place are accepted: calibrated, and as it came
    calibrated, raw = [1.0] * len(drafts), [1.0] * len(drafts)
    for place in range(block_size):
        seen = [i for i, draft in enumerate(drafts) if len(draft.logits) > place]
        best, best_error = 1.0, _error(drafts, seen, place, calibrated, 1.0)
        for candidate in sorted(TEMPERATURES, key=lambda t: max(t, 1 / t)):
            error = _error(drafts, seen, place, calibrated, candidate)
            if error is not None and best_error is not None and error < best_error:
                best, best_error = candidate, error
        temperatures.append(best)
        counts.append(len(seen))
        before.append(_error(drafts, seen, place, raw, 1.0))
        after.append(best_error)
        for i in seen:
            calibrated[i] *= sigmoid(drafts[i].logits[place] / best)
            raw[i] *= sigmoid(drafts[i].logits[place])
    return Calibration(tuple(temperatures), tuple(counts), tuple(before), tuple(after))


def _error(
    drafts: Sequence[JudgedDraft], seen: Sequence[int], place: int, survival: Sequence[float], temperature: float
) -> float | None:
    reliability = Reliability()
    for i in seen:
        expected = survival[i] * sigmoid(drafts[i].logits[place] / temperature)
        reliability.add(expected, drafts[i].num_accepted > place)
    return reliability.error
