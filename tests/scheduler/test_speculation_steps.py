"""Drafts on their way through steps: rows, blocks, limits, stops, preemption and late results."""

import pytest

from abyssal.core.request import FinishReason, RequestStatus, RowSchedule
from abyssal.scheduler.acceptance import Acceptance
from abyssal.scheduler.auto_speculation import AutoSpeculation
from abyssal.scheduler.costs import StepCosts
from abyssal.scheduler.speculation import FixedSpeculation, Speculation


def fixed(count):
    return Speculation(FixedSpeculation(count), Acceptance((1.0,) * 5))


def automatic():
    costs, acceptance = StepCosts([(1, 1e-3), (100, 5e-3)], [(1, 1e-4)], 1e-5), Acceptance((1.0,) * 5)
    return Speculation(AutoSpeculation(costs, acceptance, window=16), acceptance, costs)


SPECULATIONS = {"fixed 1": lambda: fixed(1), "fixed 5": lambda: fixed(5), "auto": automatic}


def add_all(loop, *requests):
    for request in requests:
        loop.scheduler.add(request)


def drafts_by_id(scheduled):
    return {rows.request_id: rows.num_drafts for rows in scheduled.rows}


@pytest.mark.parametrize("speculation", SPECULATIONS.values(), ids=SPECULATIONS.keys())
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_outputs_are_those_without_drafts(make_loop, make_request, expected_output, speculation, depth):
    loop = make_loop(num_blocks=6, max_num_batched_tokens=40, depth=depth, shuffle_seed=3, speculation=speculation())
    requests = [make_request(30 + 17 * i, 90 + 11 * i) for i in range(6)]
    add_all(loop, *requests)
    loop.drain()
    for request in requests:
        assert request.output_token_ids == expected_output(request, request.params.max_tokens)
    assert loop.runner.num_accepted > 20
    assert loop.scheduler.num_preemptions > 0


def test_rows_of_a_request(make_loop, make_request):
    """Its own row and five drafts; what was not accepted is computed again."""
    loop, request = make_loop(speculation=fixed(5)), make_request(10, 60)
    loop.scheduler.add(request)
    first = loop.step().rows[0]
    assert (first.start, first.num_rows, first.num_drafts, first.drafts_wanted) == (0, 10, 0, 5)
    while not request.is_finished:
        num_tokens = request.num_tokens
        rows = loop.step().rows[0]
        assert (rows.start, rows.num_rows, rows.num_logit_rows) == (num_tokens - 1, 1 + rows.num_drafts, 1 + rows.num_drafts)
        assert 1 <= request.num_tokens - num_tokens <= 1 + rows.num_drafts
        assert request.is_finished or request.num_computed_tokens == request.num_tokens - 1


def test_no_draft_beyond_the_last_token(make_loop, make_request):
    """A request of n tokens to go verifies n - 1 drafts at most, and orders none that could not be used."""
    loop = make_loop(num_blocks=1, speculation=fixed(5))
    by_max_tokens, by_length = make_request(3, 4), make_request(3, 50, max_total_tokens=9)
    add_all(loop, by_max_tokens)
    while not by_max_tokens.is_finished:
        left = 4 - len(by_max_tokens.output_token_ids)
        rows = loop.step().rows[0]
        assert rows.num_drafts <= left - 1
        assert rows.drafts_wanted == max(0, min(5, left - 2))
    add_all(loop, by_length)
    while not by_length.is_finished:
        left = 9 - by_length.num_tokens
        assert loop.step().rows[0].num_drafts <= left - 1
    filling = make_request(100, None)
    add_all(loop, filling)
    loop.drain()
    assert (filling.finish_reason, filling.num_tokens) == (FinishReason.LENGTH, 129)


def test_a_single_token_is_never_drafted_for(make_loop, make_request):
    loop = make_loop(speculation=fixed(5))
    add_all(loop, make_request(3, 1), make_request(3, 2))
    assert [rows.drafts_wanted for rows in loop.step().rows] == [0, 0]


def test_rows_of_drafts_fill_what_is_left_of_the_budget(make_loop, make_request):
    loop = make_loop(max_num_batched_tokens=9, speculation=fixed(5))
    add_all(loop, *(make_request(1, 40) for _ in range(6)))
    loop.step()
    assert loop.step().draft_rows == 3
    while loop.scheduler.num_running == 6:
        scheduled = loop.step()
        assert len(scheduled.rows) == 6
        assert scheduled.num_rows <= 9


def test_a_draft_takes_no_block_from_anybody(make_loop, make_request):
    """Both fill a block to its end, and no other is free: drafts wait, requests are not sent back for them."""
    loop = make_loop(num_blocks=2, speculation=fixed(5))
    requests = [make_request(122, 6), make_request(122, 6)]
    add_all(loop, *requests)
    loop.drain()
    assert loop.scheduler.num_preemptions == 0
    assert loop.runner.num_verified > 0


def test_positions_fed_one_a_step_have_no_drafts(make_loop, make_request):
    loop = make_loop(speculation=fixed(5))
    one_by_one, in_pairs = (
        make_request(3, 30, row_schedule=RowSchedule(decode_from=10)),
        make_request(3, 30, row_schedule=RowSchedule(chunk=2)),
    )
    add_all(loop, one_by_one, in_pairs)
    while loop.scheduler.has_unfinished:
        for rows in loop.step().rows:
            if rows.request_id == one_by_one.request_id and rows.start >= 10:
                assert rows.num_drafts == 0
            if rows.request_id == in_pairs.request_id:
                assert rows.num_rows <= 2
    assert loop.runner.num_verified > 0


def test_a_stop_inside_an_accepted_run_drops_what_follows(make_loop, make_request, expected_output):
    loop = make_loop(max_num_batched_tokens=200, speculation=fixed(5))
    requests = [make_request(3, 60, eos_token_ids=frozenset(range(8))) for _ in range(30)]
    add_all(loop, *requests)
    num_dropped = 0
    while loop.scheduler.has_unfinished:
        before = {r.request_id: len(r.output_token_ids) for r in requests}
        loop.depth = 9
        loop.step()
        (_, result), loop.depth = loop.pending[-1], 1
        loop.update()
        for request in requests:
            drawn = result.sampled.get(request.request_id, [])
            num_dropped += before[request.request_id] + len(drawn) - len(request.output_token_ids)
    assert num_dropped > 5
    for request in requests:
        expected = expected_output(request, 60)
        length = next((i for i, t in enumerate(expected) if t < 8), 59) + 1
        assert request.output_token_ids == expected[:length]


def test_min_tokens_is_counted_in_tokens(make_loop, make_request, expected_output):
    loop = make_loop(max_num_batched_tokens=200, speculation=fixed(5))
    requests = [make_request(3, 60, eos_token_ids=frozenset(range(25)), min_tokens=7) for _ in range(20)]
    add_all(loop, *requests)
    loop.drain()
    for request in requests:
        expected = expected_output(request, 60)
        length = next(i for i, t in enumerate(expected) if t < 25 and i >= 6) + 1
        assert request.output_token_ids == expected[:length]


def test_stopping_at_an_earlier_token_of_the_last_step(make_loop, make_request, expected_output):
    loop, request = make_loop(), make_request(3, 60)
    loop.scheduler.add(request)
    for _ in range(5):
        loop.step()
    assert loop.scheduler.stop(request.request_id, "end", num_output_tokens=3) is request
    assert request.output_token_ids == expected_output(request, 3)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "end")


def test_preempted_with_drafts_in_flight(make_loop, make_request, expected_output):
    loop = make_loop(num_blocks=3, max_num_batched_tokens=1000, depth=2, speculation=fixed(5))
    old, young = make_request(60, 90), make_request(120, 90)
    add_all(loop, old, young)
    loop.steps_until(lambda: young.status is RequestStatus.PREEMPTED)
    loop.drain()
    for request in (old, young):
        assert request.output_token_ids == expected_output(request, 90)


@pytest.mark.parametrize("end", ["abort", "stop", "fail"])
def test_ended_with_drafts_in_flight(make_loop, make_request, expected_output, end):
    loop = make_loop(depth=2, speculation=fixed(5))
    request, other = make_request(5, 90), make_request(5, 90)
    add_all(loop, request, other)
    for _ in range(8):
        loop.step()
    if end == "fail":
        loop.runner.failing.add(request.request_id)
        loop.steps_until(lambda: request.is_finished)
    else:
        getattr(loop.scheduler, end)(request.request_id)
    loop.scheduler.check_integrity()
    loop.drain()
    assert other.output_token_ids == expected_output(other, 90)
    assert request.output_token_ids == expected_output(request, len(request.output_token_ids))


def test_counts_of_drafts(make_loop, make_request):
    loop = make_loop(speculation=fixed(3))
    add_all(loop, *(make_request(4, 50) for _ in range(4)))
    loop.drain()
    stats = loop.scheduler.speculation.acceptance.stats()
    assert sum(place.verified for place in stats.places) == loop.runner.num_verified
    assert sum(place.accepted for place in stats.places) == loop.runner.num_accepted
    assert stats.num_tokens == 4 * (50 - 1)  # the first token of each came with its prompt
    assert stats.num_tokens == stats.num_steps + loop.runner.num_accepted
    assert [place.drafted for place in stats.places[3:]] == [0, 0]
