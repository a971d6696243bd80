"""Which drafts are verified: against brute force over all choices, and without a look at the drafts that are judged."""

import itertools
import math
import random

import pytest

from abyssal.scheduler.acceptance import Acceptance, survivals
from abyssal.scheduler.auto_speculation import AutoSpeculation, _State
from abyssal.scheduler.costs import StepCosts
from abyssal.scheduler.speculation import FixedSpeculation, Proposal, Speculation, best_total, split_rows


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


def drafting(costs, acceptance, rule_of=AutoSpeculation):
    """A rule that has found that drafting pays."""
    rule = rule_of(costs, acceptance, window=16)
    rule._state = _State.DRAFTING
    return rule


def lengths_of(rule, current, proposals, other_rows, room):
    """What is verified, `current` being the confidences of the drafts at hand."""
    speculation = Speculation(rule, Acceptance((1.0,) * 5))
    total = speculation.total(proposals, other_rows, room)
    return speculation.split(total, [c[: p.most] for c, p in zip(current, proposals, strict=True)])


def share_of_a(earlier_of):
    """Probability that the first token is A, with acceptance by rejection; `earlier_of(draft)` decides on the total."""
    share = 0.0
    for draft, probability in DRAFTER.items():
        rule = drafting(COSTS, Acceptance((1.0, 1.0)))
        (length,) = lengths_of(rule, [CONFIDENCE[draft]], [Proposal(earlier_of(draft), 2)], 0, 2)
        if length == 0:
            share += probability * TARGET["A"]
            continue
        accepted = min(1.0, TARGET[draft] / DRAFTER[draft])
        # A token in the place of a rejected B comes from the positive part of p - q, which is all A.
        share += probability * (accepted * (draft == "A") + (1 - accepted) * 1.0)
    return share


@pytest.mark.parametrize("earlier", [logits(0.8, 0.9), logits(0.8, 0.0), logits(0.99, 0.99), logits(0.1, 0.1), ()])
def test_the_total_does_not_look_at_the_drafts(earlier):
    assert share_of_a(lambda draft: earlier) == pytest.approx(0.70, abs=1e-12)


def test_the_counter_example_shows_when_it_does():
    """The mutation: the total is chosen by the drafts that it decides on."""
    assert share_of_a(lambda draft: CONFIDENCE[draft]) == pytest.approx(0.85, abs=1e-12)


def test_whether_a_draft_is_verified_does_not_depend_on_it():
    """Confidences behind a draft were computed from it; whatever they are, it is verified or not as before."""
    rng = random.Random(1)
    for _ in range(300):
        current = [logits(*(rng.choice((0.3, 0.7, 1.0)) for _ in range(5))) for _ in range(3)]
        earlier = [logits(*(rng.random() for _ in range(5))) for _ in range(3)]
        costs = Table(jagged_table(rng, "steps", 20))
        proposals = [Proposal(e, 5) for e in earlier]
        before = lengths_of(drafting(costs, Acceptance((1.0,) * 5)), current, proposals, 0, 15)
        i, place = rng.randrange(3), rng.randrange(5)
        current[i] = current[i][: place + 1] + logits(*(rng.choice((0.0, 0.5, 1.0)) for _ in range(4 - place)))
        after = lengths_of(drafting(costs, Acceptance((1.0,) * 5)), current, proposals, 0, 15)
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
    confident = [Proposal(logits(*(0.9,) * 5), 5)] * 8
    assert drafting(step_costs(0.0), Acceptance((1.0,) * 5)).total(confident, 0, 100) == 40
    assert drafting(step_costs(10.0, base=0.0), Acceptance((1.0,) * 5)).total(confident, 0, 100) == 0


@pytest.mark.parametrize("seconds", [0.0, 0.3, 3.0])
def test_the_price_of_a_step_includes_its_drafting(seconds):
    """Two requests, survivals 0.7, 0.49, ...: the total by trying all. What is paid anyway makes further rows worth more."""
    rule = drafting(step_costs(0.3, drafting=seconds), Acceptance((1.0,) * 5))
    survival = [0.7**k for k in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)]
    speeds = [(2 + sum(survival[:n])) / (1.0 + 0.3 * (2 + n) + seconds) for n in range(11)]
    assert rule.total([Proposal(logits(*(0.7,) * 5), 5)] * 2, 0, 100) == speeds.index(max(speeds))


def test_fewer_drafts_for_each_the_more_requests_there_are():
    """A step that costs as much as 20 rows more, whatever else is in it: many requests fill it by themselves."""
    shares = []
    for num_requests in (1, 4, 16, 64, 256):
        rule = drafting(step_costs(0.05), Acceptance((1.0,) * 5))
        proposals = [Proposal(logits(*(0.7,) * 5), 5)] * num_requests
        shares.append(rule.total(proposals, 0, 10_000) / num_requests)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 5
    assert shares[-1] < 1.1


def test_prompt_rows_come_before_drafts():
    rule = drafting(step_costs(0.001), Acceptance((1.0,) * 5))
    proposals = [Proposal(logits(*(0.9,) * 5), 5)] * 4
    assert rule.total(proposals, 100, 100) == 0
    assert rule.total(proposals, 90, 100) == 10


class Drafter:
    """Runs a rule over steps of a fixed number of requests; each draft is accepted with the same probability."""

    def __init__(self, costs, share, num_requests, seed=0):
        self.costs, self.share, self.num_requests = costs, share, num_requests
        self.random = random.Random(seed)
        self.acceptance = Acceptance((1.0,) * 5)
        self.rule = AutoSpeculation(costs, self.acceptance, window=16)
        self.drafts = [()] * num_requests
        self.seconds = self.tokens = self.num_watched = self.num_steps = 0

    def step(self):
        proposals = [Proposal((), len(own)) for own in self.drafts]
        lengths = split_rows(self.rule.total(proposals, 0, 1000), [survivals([0.8] * len(own)) for own in self.drafts])
        wanted = self.rule.wanted([5] * self.num_requests, 0, 1000)
        tokens = 0
        for own, length in zip(self.drafts, lengths, strict=True):
            accepted = 0
            while accepted < length and self.random.random() < self.share:
                accepted += 1
            self.acceptance.record_verified(own, length, accepted)
            tokens += 1 + accepted
        num_drafting = sum(count > 0 for count in wanted)
        self.seconds += self.costs.seconds(self.num_requests + sum(lengths), tokens)
        self.seconds += self.costs.drafting_seconds(num_drafting)
        self.tokens += tokens
        self.num_watched += self.rule.observes
        self.num_steps += 1
        self.drafts = [logits(*(0.8,) * count) for count in wanted]
        return num_drafting

    def speed(self, num_steps):
        """Tokens a second over the next steps, against those without drafts."""
        begun = (self.seconds, self.tokens)
        for _ in range(num_steps):
            self.step()
        alone = self.num_requests / self.costs.seconds(self.num_requests, self.num_requests)
        return (self.tokens - begun[1]) / (self.seconds - begun[0]) / alone


@pytest.mark.parametrize("num_requests", [1, 2, 16, 200])
def test_a_bad_drafter_costs_next_to_nothing(num_requests):
    drafter = Drafter(step_costs(0.05, drafting=0.5), 0.0, num_requests)
    drafter.speed(60)
    assert drafter.speed(20_000) > 0.99
    assert drafter.num_watched < 0.25 * drafter.num_steps
    assert drafter.acceptance.num_judged > 100  # it is tried again and again


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_a_good_drafter_is_used(num_requests):
    drafter = Drafter(step_costs(0.02, drafting=0.2), 0.8, num_requests)
    drafter.speed(20)
    assert drafter.speed(500) > 1.5
    assert drafter.num_watched == drafter.num_steps


def test_a_drafter_that_becomes_good_is_noticed_and_one_that_becomes_bad_is_left():
    drafter = Drafter(step_costs(0.02, drafting=0.2), 0.0, 2)
    drafter.speed(5_000)
    drafter.share = 0.9
    drafter.speed(5_000)
    assert drafter.speed(200) > 1.5
    drafter.share = 0.0
    drafter.speed(100)
    assert drafter.speed(5_000) > 0.98


def test_no_drafts_where_the_batch_is_full_but_at_once_when_it_empties():
    drafter = Drafter(step_costs(0.1, drafting=0.2), 0.8, 2)
    drafter.speed(50)
    assert drafter.step() == 2
    drafter.num_requests, drafter.drafts = 400, [()] * 400
    drafter.speed(30)
    assert drafter.step() == 0
    drafter.num_requests, drafter.drafts = 2, [()] * 2
    drafter.speed(16 + 8 + 1)
    assert drafter.step() == 2


def test_long_prompts_beside_them_stop_drafts_but_not_watching():
    drafter = Drafter(step_costs(0.05, drafting=0.2), 0.8, 2)
    drafter.speed(50)
    assert drafter.rule.wanted([5, 5], 998, 998) == [0, 0]
    assert drafter.rule.observes
    assert drafter.rule.wanted([5, 5], 0, 998) == [5, 5]


def test_probes_take_turns():
    drafter = Drafter(step_costs(1.0, base=0.0), 0.0, 12)
    probed = set()
    for _ in range(5_000):
        drafter.step()
        probed |= {i for i, own in enumerate(drafter.drafts) if own}
    assert probed == set(range(12))


def test_fixed_numbers_take_what_room_there_is():
    rule = FixedSpeculation(3)
    current = [logits(*(0.5,) * n) for n in (3, 1, 3, 3)]
    proposals = [Proposal((), n) for n in (3, 1, 3, 3)]
    assert lengths_of(rule, current, proposals, 50, 100) == [3, 1, 3, 3]
    assert lengths_of(rule, current, proposals, 0, 6) == [2, 1, 2, 1]
    assert rule.wanted([5, 2, 0], 0, 100) == [3, 2, 0]
