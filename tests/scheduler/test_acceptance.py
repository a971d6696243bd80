"""Confidences, what corrects them, and their reliability; costs by rows. Expected values by hand."""

import math
import random

import pytest

from abyssal.core.batch import StepTiming
from abyssal.scheduler.acceptance import Acceptance, Reliability, sigmoid, survivals
from abyssal.scheduler.costs import CostCurve, StepCosts, rising


def logit(p):
    return math.log(p / (1 - p))


def test_sigmoid_of_any_logit():
    assert [sigmoid(x) for x in (-math.inf, -800.0, 0.0, 800.0, math.inf)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert sigmoid(1.25) == pytest.approx(1 / (1 + math.exp(-1.25)))


def test_survivals_are_running_products():
    assert survivals([0.5, 0.5, 0.1]) == pytest.approx([0.5, 0.25, 0.025])


def test_temperatures_by_place():
    acceptance = Acceptance((1.0, 2.0))
    assert acceptance.conditional([3.0, 3.0]) == pytest.approx([sigmoid(3.0), sigmoid(1.5)])


def test_counts():
    acceptance = Acceptance((1.0,) * 3)
    for num_drafted, num_verified, num_accepted in ((3, 3, 3), (3, 3, 1), (3, 2, 2), (2, 0, 0), (0, 0, 0)):
        acceptance.record_drafted((0.0,) * num_drafted)
        acceptance.record_verified((0.0,) * num_drafted, num_verified, num_accepted)
    stats = acceptance.stats()
    assert [(p.drafted, p.verified, p.accepted) for p in stats.places] == [(4, 3, 3), (4, 3, 2), (3, 2, 1)]
    assert (stats.num_steps, stats.num_tokens, stats.tokens_per_step) == (5, 11, 11 / 5)
    assert Acceptance((1.0,)).stats().tokens_per_step is None


def test_calibration_error():
    """Bin [0.8, 0.9): three of four happened at 0.85; bin [0.2, 0.3): one of one at 0.25."""
    reliability = Reliability()
    assert reliability.error is None
    for observed in (True, True, True, False):
        reliability.add(0.85, observed)
    reliability.add(0.25, True)
    assert reliability.error == pytest.approx((abs(4 * 0.85 - 3) + abs(0.25 - 1)) / 5)


def test_calibration_error_is_that_of_survivals():
    acceptance = Acceptance((1.0, 1.0))
    for accepted in (2, 1, 0, 0):
        acceptance.record_verified((logit(0.5), logit(0.4)), 2, accepted)
    errors = [place.calibration_error for place in acceptance.stats().places]
    assert errors == pytest.approx([abs(0.5 - 2 / 4), abs(0.5 * 0.4 - 1 / 4)])


def test_overconfidence_is_corrected_place_by_place():
    """Confidence 0.8 everywhere; accepted with 0.8 at first and 0.2 behind that."""
    rng, acceptance = random.Random(0), Acceptance((1.0,) * 2)
    for _ in range(1000):
        accepted = 0
        while accepted < 2 and rng.random() < (0.8, 0.2)[accepted]:
            accepted += 1
        acceptance.record_verified((logit(0.8),) * 2, 2, accepted)
    first, second = acceptance.conditional((logit(0.8),) * 2)
    assert first == pytest.approx(0.8, abs=0.15)
    assert second == pytest.approx(0.2, abs=0.15)
    assert max(acceptance.conditional((50.0, 50.0))) <= 1.0


def test_only_judged_drafts_correct():
    """Behind a rejected draft nothing is known of the next one."""
    acceptance = Acceptance((1.0,) * 2)
    for _ in range(100):
        acceptance.record_verified((logit(0.8),) * 2, 2, 0)
    first, second = acceptance.conditional((logit(0.8),) * 2)
    assert first < 0.1
    assert second == pytest.approx(0.8)


def test_cost_between_and_beyond_points():
    curve = CostCurve([(8, 2.0), (1, 1.0), (4, 1.0)])
    assert [curve.seconds(n) for n in (1, 2, 4, 6, 8, 12)] == pytest.approx([1, 1, 1, 1.5, 2, 3])
    assert CostCurve([(2, 1.0)]).seconds(6) == pytest.approx(3.0)
    assert CostCurve([(1, 2.0), (2, 1.0)]).seconds(2) == 1.5  # noise does not make larger steps cheaper


def test_the_nearest_rising_sequence():
    assert rising([1.0, 3.0, 2.0, 2.0, 5.0, 4.0]) == pytest.approx([1, 7 / 3, 7 / 3, 7 / 3, 4.5, 4.5])
    assert rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert rising([]) == []


def test_costs_follow_what_is_observed():
    curve = CostCurve([(1, 1.0), (10, 2.0), (100, 10.0)])
    for _ in range(100):
        curve.observe(10, 3.0)
    assert curve.seconds(10) == pytest.approx(3.0, rel=0.01)
    assert curve.seconds(1) == pytest.approx(1.5, rel=0.01)  # never observed: all points moved alike
    for _ in range(100):
        curve.observe(1, 1.0)
    assert curve.seconds(1) == pytest.approx(1.0, rel=0.01)
    assert curve.seconds(10) == pytest.approx(3.0, rel=0.01)


def test_one_outlier_is_no_new_cost():
    curve = CostCurve([(1, 1.0), (10, 2.0)])
    curve.observe(1, 1000.0)
    assert curve.seconds(1) < 1.11


def test_costs_of_a_step():
    costs = StepCosts([(1, 1.0), (11, 2.0)], [(1, 0.5)], sampling=0.01)
    assert costs.seconds(6, 3) == pytest.approx(1.5 + 0.03)
    assert (costs.drafting_seconds(0), costs.drafting_seconds(1)) == (0.0, 0.5)
    for _ in range(200):
        costs.observe(StepTiming(1.0, 0.08, 0.25), num_rows=1, num_tokens=2, num_drafting=1)
    assert costs.seconds(1, 2) == pytest.approx(1.0 + 2 * 0.04, rel=0.01)
    assert costs.drafting_seconds(1) == pytest.approx(0.25, rel=0.01)
