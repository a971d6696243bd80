"""Which drafts are verified: against brute force over all choices, and without a look at the drafts that are judged."""

import itertools
import math
import random

import pytest

from abyssal.scheduler.acceptance import Acceptance, survivals
from abyssal.scheduler.costs import StepCosts
from abyssal.scheduler.speculation import AutoSpeculation, FixedSpeculation, Proposal, best_total, split_rows


class Table:
    """Any cost table: seconds by rows, and seconds for each token."""

    def __init__(self, seconds, per_token=0.0):
        self._seconds, self._per_token = seconds, per_token

    def seconds(self, num_rows, num_tokens):
        return self._seconds[num_rows] + self._per_token * num_tokens

    def drafting_seconds(self, num_requests):
        return 0.0


def logit(p):
    return math.inf if p == 1 else -math.inf if p == 0 else math.log(p / (1 - p))


def logits(*conditional):
    return tuple(logit(p) for p in conditional)


def jagged_table(rng, kind, size):
    if kind == "steps":  # only some sizes exist, as with recorded graphs
        edges = [*sorted(rng.sample(range(1, size), 4)), size]
        costs = sorted(rng.uniform(1, 4) for _ in edges)
        return [next(c for e, c in zip(edges, costs, strict=True) if n <= e) for n in range(size + 1)]
    if kind == "falling":  # a larger step may be the faster one
        return [rng.uniform(1, 3) for _ in range(size + 1)]
    slope = rng.uniform(0.01, 1)
    return [1 + slope * n + rng.uniform(0, 0.2) for n in range(size + 1)]


@pytest.mark.parametrize("kind", ["steps", "falling", "rising"])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 4])
def test_equals_brute_force(kind, num_requests):
    rng = random.Random(f"{kind} {num_requests}")
    for _ in range(25 if num_requests < 4 else 8):
        other_rows, most = rng.choice((0, 0, 7)), [rng.randint(0, 5) for _ in range(num_requests)]
        draw = (rng.random, lambda: rng.choice((0.0, 0.5, 1.0)))[rng.random() < 0.3]
        expected = [survivals([draw() for _ in range(m)]) for m in most]
        costs = Table(jagged_table(rng, kind, 31), rng.choice((0.0, 0.05)))
        drafting = rng.choice((0.0, 0.5))
        room = rng.choice((3, 24))

        def speed(
            lengths,
            expected=expected,
            other_rows=other_rows,
            costs=costs,
            drafting=drafting,
        ):
            tokens = num_requests + sum(sum(a[:n]) for a, n in zip(expected, lengths, strict=True))
            seconds = costs.seconds(num_requests + other_rows + sum(lengths), tokens) + drafting
            return (tokens + other_rows) / seconds

        choices = itertools.product(*(range(m + 1) for m in most))
        best = max(speed(lengths) for lengths in choices if sum(lengths) <= room)
        total, reported = best_total(num_requests, expected, other_rows, room, costs, drafting)
        lengths = split_rows(total, expected)
        assert sum(lengths) == total <= room
        assert all(n <= m for n, m in zip(lengths, most, strict=True))
        assert speed(lengths) == pytest.approx(best, rel=1e-12)
        assert reported == pytest.approx(best, rel=1e-12)


def test_ties_go_to_the_earlier_draft_and_the_smaller_total():
    assert split_rows(3, [[1.0, 1.0], [1.0, 1.0]]) == [2, 1]
    assert split_rows(2, [[0.5, 0.5, 0.5], [0.9, 0.5]]) == [1, 1]
    assert best_total(1, [[0.0, 0.0]], 0, 2, Table([1, 1, 1, 1]))[0] == 0


# The counter-example: block of 2, steps a second by rows (1, 0.5, 0.45), first draft accepted with 0.8, the second with 0.9
# after A and never after B; target p, drafter q. Choosing the total by the drafts at hand gives A too often.
TARGET, DRAFTER = {"A": 0.7, "B": 0.3}, {"A": 0.5, "B": 0.5}
COSTS = Table([math.inf, 1 / 1, 1 / 0.5, 1 / 0.45])
CONFIDENCE = {"A": logits(0.8, 0.9), "B": logits(0.8, 0.0)}


class LooksAtTheDrafts(AutoSpeculation):
    """The mutation: the total is chosen by the drafts that it decides on."""

    def _judged(self, proposal):
        return self._acceptance.conditional(proposal.current)


def share_of_a(rule_of, earlier):
    """Probability that the first token is A, with acceptance by rejection."""
    share = 0.0
    for draft, probability in DRAFTER.items():
        (length,) = rule_of(COSTS, Acceptance((1.0, 1.0))).lengths([Proposal(CONFIDENCE[draft], earlier, 2)], 0, 2)
        if length == 0:
            share += probability * TARGET["A"]
            continue
        accepted = min(1.0, TARGET[draft] / DRAFTER[draft])
        # A token in the place of a rejected B comes from the positive part of p - q, which is all A.
        share += probability * (accepted * (draft == "A") + (1 - accepted) * 1.0)
    return share


@pytest.mark.parametrize("earlier", [logits(0.8, 0.9), logits(0.8, 0.0), logits(0.99, 0.99), logits(0.1, 0.1), ()])
def test_the_total_does_not_look_at_the_drafts(earlier):
    assert share_of_a(AutoSpeculation, earlier) == pytest.approx(0.70, abs=1e-12)


def test_the_counter_example_shows_when_it_does():
    assert share_of_a(LooksAtTheDrafts, ()) == pytest.approx(0.85, abs=1e-12)


def test_whether_a_draft_is_verified_does_not_depend_on_it():
    """Confidences behind a draft were computed from it; whatever they are, it is verified or not as before."""
    rng = random.Random(1)
    for _ in range(300):
        current = [logits(*(rng.choice((0.3, 0.7, 1.0)) for _ in range(5))) for _ in range(3)]
        earlier = [logits(*(rng.random() for _ in range(5))) for _ in range(3)]
        costs = Table(jagged_table(rng, "steps", 20))
        proposals = [Proposal(c, e, 5) for c, e in zip(current, earlier, strict=True)]
        before = AutoSpeculation(costs, Acceptance((1.0,) * 5)).lengths(proposals, 0, 15)
        i, place = rng.randrange(3), rng.randrange(5)
        changed = current[i][: place + 1] + logits(*(rng.choice((0.0, 0.5, 1.0)) for _ in range(4 - place)))
        proposals[i] = Proposal(changed, earlier[i], 5)
        after = AutoSpeculation(costs, Acceptance((1.0,) * 5)).lengths(proposals, 0, 15)
        assert (before[i] > place) == (after[i] > place)


def test_drafts_at_hand_are_no_part_of_what_is_typical():
    acceptance = Acceptance((1.0,) * 3)
    before = acceptance.typical(3)
    acceptance.record_drafted(logits(0.1, 0.1, 0.1))
    assert acceptance.typical(3) == before
    acceptance.record_verified(logits(0.1, 0.1, 0.1), 0, 0)
    assert acceptance.typical(3) < before


def step_costs(per_row, *, base=1.0, drafting=0.1):
    return StepCosts([(1, base + per_row), (200, base + 200 * per_row)], [(1, drafting), (64, drafting)])


def test_free_rows_are_all_used_and_dear_ones_not_at_all():
    confident = [Proposal(logits(*(0.9,) * 5), logits(*(0.9,) * 5), 5)] * 8
    assert AutoSpeculation(step_costs(0.0), Acceptance((1.0,) * 5)).lengths(confident, 0, 100) == [5] * 8
    assert AutoSpeculation(step_costs(10.0, base=0.0), Acceptance((1.0,) * 5)).lengths(confident, 0, 100) == [0] * 8


def test_fewer_drafts_for_each_the_more_requests_there_are():
    """A step that costs as much as 20 rows more, whatever else is in it: many requests fill it by themselves."""
    shares = []
    for num_requests in (1, 4, 16, 64, 256):
        rule = AutoSpeculation(step_costs(0.05), Acceptance((1.0,) * 5))
        proposals = [Proposal(logits(*(0.7,) * 5), logits(*(0.7,) * 5), 5)] * num_requests
        shares.append(sum(rule.lengths(proposals, 0, 10_000)) / num_requests)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 5
    assert shares[-1] < 1.1


def test_prompt_rows_come_before_drafts():
    rule = AutoSpeculation(step_costs(0.001), Acceptance((1.0,) * 5))
    proposals = [Proposal(logits(*(0.9,) * 5), logits(*(0.9,) * 5), 5)] * 4
    assert rule.lengths(proposals, 100, 100) == [0] * 4
    assert sum(rule.lengths(proposals, 90, 100)) == 10


def test_nothing_is_drafted_where_it_does_not_pay_but_now_and_then():
    costs = step_costs(1.0, base=0.0, drafting=3.0)
    rule = AutoSpeculation(costs, Acceptance((1.0,) * 5))
    spent = saved = probes = 0.0
    for _ in range(20_000):
        wanted = rule.wanted([5] * 8, 0, 100)
        drafting = sum(count > 0 for count in wanted)
        assert drafting <= 1
        saved += costs.seconds(8, 8)
        if drafting:
            probes += 1
            proposals = [Proposal(logits(*(0.1,) * 5), (), 5) for count in wanted if count]
            assert rule.lengths(proposals, 0, 100) == [1]
            spent += 3.0 + costs.seconds(9, 9) - costs.seconds(8, 8)
    assert probes > 20
    assert spent / saved < 0.0101


def test_probes_take_turns():
    rule = AutoSpeculation(step_costs(1.0, base=0.0), Acceptance((1.0,) * 5))
    probed = set()
    for _ in range(2_000):
        wanted = rule.wanted([5, 0, 5, 5], 0, 100)
        probed |= {i for i, count in enumerate(wanted) if count}
    assert probed == {0, 2, 3}


def test_drafting_begins_when_it_pays_again():
    acceptance = Acceptance((1.0,) * 5)
    rule = AutoSpeculation(step_costs(0.0, drafting=0.3), acceptance)
    assert rule.wanted([5], 0, 100) == [5]
    for _ in range(200):
        acceptance.record_verified(logits(*(0.9,) * 5), 5, 0)
    assert rule.wanted([5], 0, 100) == [0]
    for _ in range(200):
        acceptance.record_verified(logits(*(0.9,) * 5), 5, 5)
    assert rule.wanted([5], 0, 100) == [5]


def test_fixed_numbers_take_what_room_there_is():
    rule = FixedSpeculation(3)
    proposals = [Proposal(logits(*(0.5,) * n), (), n) for n in (3, 1, 3, 3)]
    assert rule.lengths(proposals, 50, 100) == [3, 1, 3, 3]
    assert rule.lengths(proposals, 0, 6) == [3, 1, 2, 0]
    assert rule.wanted([5, 2, 0], 0, 100) == [3, 2, 0]
