"""Ten thousand random events on pools far too small, with everything that must hold checked after each of them.

The fake runner checks rows, tables and block contents; here the queues, the budget, the order and the outputs are checked.
What a request must have generated is computed without a scheduler, from its prompt and seed.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from abyssal.core.request import FinishReason, RequestStatus, RowSchedule
from abyssal.scheduler.acceptance import Acceptance
from abyssal.scheduler.auto_speculation import AutoSpeculation
from abyssal.scheduler.costs import StepCosts
from abyssal.scheduler.speculation import Speculation

EOS, STOP_ID = 7, 11
STOPPED_OUTSIDE = "outside"


class Simulation:
    """Random arrivals, aborts, stops, failures and steps. Many prompts nearly fill a block, and soon want another."""

    def __init__(self, loop, make_request, seed, longest_prompt):
        self.loop, self.make_request, self.longest_prompt = loop, make_request, longest_prompt
        self.random = random.Random(seed)
        self.requests = []
        self.first_admissions = []
        self.num_preempted_in_flight = 0

    def unfinished(self):
        return [request for request in self.requests if not request.is_finished]

    def event(self):
        """One random event, then all checks."""
        kind = self.random.choices(("add", "abort", "stop", "fail", "step"), (60, 3, 3, 3, 931))[0]
        unfinished = self.unfinished()
        if kind == "add":
            if len(unfinished) < 40:
                self.add()
        elif kind == "step":
            self.step()
        elif unfinished:
            request_id = self.random.choice(unfinished).request_id
            if kind == "abort":
                self.loop.scheduler.abort(request_id)
            elif kind == "stop":
                self.loop.scheduler.stop(request_id, STOPPED_OUTSIDE)
            else:
                self.loop.runner.failing.add(request_id)
        self.loop.scheduler.check_integrity()

    def add(self):
        lowest, highest = self.random.choices(((1, 60), (120, 128), (1, self.longest_prompt)), (5, 4, 1))[0]
        prompt_len = self.random.randint(lowest, highest)
        row_schedule = RowSchedule(self.random.choice((None, 5)), self.random.choice((None, None, None, 3)))
        request = self.make_request(
            prompt_len,
            self.random.choice((1, 20, 200, 400, None)),
            max_total_tokens=self.random.choice((prompt_len + 60, 3000, 3000)),
            eos_token_ids=frozenset({EOS}),
            ignore_eos=self.random.random() < 0.7,
            stop_token_ids=(STOP_ID,) if self.random.random() < 0.2 else (),
            row_schedule=row_schedule if self.random.random() < 0.2 else RowSchedule(),
        )
        self.requests.append(request)
        self.loop.scheduler.add(request)

    def step(self):
        unfinished = self.unfinished()
        in_flight = {r.request_id for scheduled, _ in self.loop.pending for r in scheduled.rows}
        before = {r.request_id: r.num_preemptions for r in unfinished}
        scheduled = self.loop.step()
        ids = [rows.request_id for rows in scheduled.rows]
        assert len(set(ids)) == len(ids), "a request has rows twice in one step"
        assert scheduled.num_rows <= self.loop.max_num_batched_tokens
        assert len(ids) <= self.loop.max_num_seqs
        if unfinished and self.loop.depth == 1:
            assert unfinished[0].request_id in ids, "the oldest request did not advance"
        if unfinished:
            assert unfinished[0].num_preemptions == before[unfinished[0].request_id], "the oldest request was sent back"
        by_id = {request.request_id: request for request in unfinished}
        assigned = [by_id[a.request_id] for a in scheduled.assignments]
        self.first_admissions += [request.arrival for request in assigned if request.num_preemptions == 0]
        self.num_preempted_in_flight += sum(by_id[i].num_preemptions > before[i] for i in in_flight & set(by_id))

    def drain(self):
        """No more arrivals: all end within the steps that the oldest needs, one after the other."""
        limit = sum(self.longest_output(request) for request in self.unfinished()) * self.loop.depth
        for _ in range(limit + 1):
            if not self.loop.scheduler.has_unfinished:
                break
            self.step()
            self.loop.scheduler.check_integrity()
        while self.loop.pending:
            self.loop.update()
        assert not self.unfinished()

    def longest_output(self, request):
        capacity = self.loop.cache.capacity_tokens + 1
        return min(request.max_total_tokens, capacity, request.num_prompt_tokens + (request.params.max_tokens or capacity))

    def check_outputs(self, expected_output):
        """Every request has the tokens and the reason that it would have had alone, or a beginning of them."""
        for request in self.requests:
            limit = self.longest_output(request) - request.num_prompt_tokens
            expected, reason, stop_reason = alone(request, expected_output(request, max(limit, 0)))
            output = request.output_token_ids
            if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or request.stop_reason == STOPPED_OUTSIDE:
                assert output == expected[: len(output)]
            else:
                assert (output, request.finish_reason, request.stop_reason) == (expected, reason, stop_reason)


def alone(request, tokens):
    """What a request gives if `tokens` is what it would generate up to its length limits."""
    for i, token_id in enumerate(tokens):
        if token_id == EOS and not request.params.ignore_eos:
            return tokens[: i + 1], FinishReason.STOP, None
        if token_id in request.params.stop_token_ids:
            return tokens[: i + 1], FinishReason.STOP, token_id
    return tokens, FinishReason.LENGTH, None


def with_drafts():
    costs, acceptance = StepCosts([(1, 1e-3), (100, 5e-3)], [(1, 1e-4)], 1e-5), Acceptance((1.0,) * 5)
    return Speculation(AutoSpeculation(costs, acceptance, window=16), acceptance, costs)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "budget", "speculation"),
    [(8, 8, 96, None), (16, 20, 24, None), (8, 8, 96, with_drafts), (16, 20, 24, with_drafts)],
    ids=["few blocks", "small budget", "few blocks, drafts", "small budget, drafts"],
)
def test_ten_thousand_random_events(
    make_loop, make_request, expected_output, depth, num_blocks, max_num_seqs, budget, speculation
):
    loop = make_loop(num_blocks, max_num_seqs, budget, depth, shuffle_seed=depth, speculation=speculation and speculation())
    simulation = Simulation(loop, make_request, seed=depth, longest_prompt=num_blocks * 140)
    for _ in range(10_000):
        simulation.event()
    simulation.drain()
    simulation.check_outputs(expected_output)

    assert simulation.first_admissions == sorted(set(simulation.first_admissions))
    assert (loop.cache.usage, loop.cache.num_free_slots) == (0.0, max_num_seqs)
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (0, 0)
    # The run must have been worth it: many requests, every way to end, and enough preemptions, in flight too.
    reasons = Counter(request.finish_reason for request in simulation.requests)
    assert len(simulation.requests) >= 100
    assert min(reasons[reason] for reason in FinishReason) >= 10
    assert loop.scheduler.num_preemptions == sum(request.num_preemptions for request in simulation.requests) >= 10
    if depth > 1:
        assert simulation.num_preempted_in_flight >= 3


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_blocks=st.integers(1, 6),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 300),
    depth=st.integers(1, 3),
    shapes=st.lists(st.tuples(st.integers(1, 800), st.integers(1, 200)), max_size=8),
)
def test_any_mix_gives_what_each_request_gives_alone(
    make_loop, make_request, expected_output, num_blocks, max_num_seqs, budget, depth, shapes
):
    loop = make_loop(num_blocks, max_num_seqs, budget, depth)
    requests = [make_request(prompt_len, max_tokens) for prompt_len, max_tokens in shapes]
    for request in requests:
        loop.scheduler.add(request)
    loop.steps_until(lambda: not loop.scheduler.has_unfinished, limit=20_000)
    for request in requests:
        capacity = num_blocks * 128
        if request.num_prompt_tokens > capacity:
            assert request.finish_reason is FinishReason.ERROR
        else:
            num_tokens = min(request.params.max_tokens, capacity + 1 - request.num_prompt_tokens)
            assert request.output_token_ids == expected_output(request, num_tokens)
            assert request.status is RequestStatus.FINISHED
