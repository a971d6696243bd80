"""Temperatures are found again on drafts whose acceptance was drawn from known ones."""

import math
import random

import pytest

from abyssal.scheduler.acceptance import sigmoid
from abyssal.scheduler.calibration import TEMPERATURES, JudgedDraft, fit_temperatures


def drawn(temperatures, count, rng, verified=None):
    drafts = []
    for _ in range(count):
        logits = tuple(rng.gauss(1.5, 2.0) for _ in temperatures)
        accepted = 0
        while accepted < len(temperatures) and rng.random() < sigmoid(logits[accepted] / temperatures[accepted]):
            accepted += 1
        length = len(temperatures) if verified is None else rng.randint(*verified)
        drafts.append(JudgedDraft(logits[:length], min(accepted, length)))
    return drafts


@pytest.mark.parametrize("temperatures", [(1.0, 1.0, 1.0), (3.0, 1.5, 2.0), (0.5, 1.0, 4.0)])
def test_known_temperatures_are_found(temperatures):
    rng = random.Random(7)
    fitted = fit_temperatures(drawn(temperatures, 8000, rng), 3)
    for found, wanted in zip(fitted.temperatures, temperatures, strict=True):
        assert abs(math.log(found / wanted)) < 0.25
    assert all(error < 0.03 for error in fitted.error_after)
    assert fitted.num_drafts == (8000,) * 3


def test_overconfidence_is_reduced():
    fitted = fit_temperatures(drawn((3.0, 3.0), 4000, random.Random(1)), 2)
    for before, after in zip(fitted.error_before, fitted.error_after, strict=True):
        assert before > 0.08
        assert after < before / 3


def test_places_that_were_not_verified():
    fitted = fit_temperatures(drawn((2.0,) * 3, 3000, random.Random(2), verified=(0, 2)), 3)
    assert fitted.num_drafts[0] > fitted.num_drafts[1] > fitted.num_drafts[2] == 0
    assert fitted.temperatures[2] == 1.0
    assert (fitted.error_before[2], fitted.error_after[2]) == (None, None)
    assert abs(math.log(fitted.temperatures[0] / 2.0)) < 0.25


def test_the_error_is_the_least_of_all_candidates():
    """Against every candidate, computed by its definition."""
    drafts = drawn((2.5,), 500, random.Random(3))
    fitted = fit_temperatures(drafts, 1)

    def error(temperature):
        bins = {}
        for draft in drafts:
            expected = sigmoid(draft.logits[0] / temperature)
            bins.setdefault(min(int(expected * 10), 9), []).append((expected, draft.num_accepted > 0))
        gaps = (abs(sum(e for e, _ in cell) - sum(o for _, o in cell)) for cell in bins.values())
        return sum(gaps) / len(drafts)

    errors = [error(t) for t in TEMPERATURES]
    assert fitted.error_after[0] == pytest.approx(min(errors))
    assert error(fitted.temperatures[0]) == pytest.approx(min(errors))


def test_nothing_to_fit():
    assert fit_temperatures([], 2).temperatures == (1.0, 1.0)
