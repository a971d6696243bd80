"""One behaviour each, on a handful of requests: chunks, order, preemption, abort, stop, errors, late results."""

import pytest

from abyssal.core.errors import InvalidRequest
from abyssal.core.request import FinishReason, RequestStatus, RowSchedule


def rows_by_id(scheduled):
    return {rows.request_id: rows.num_rows for rows in scheduled.rows}


def add_all(loop, *requests):
    for request in requests:
        loop.scheduler.add(request)


def test_nothing_to_do(make_loop):
    loop = make_loop()
    assert (loop.step().rows, loop.scheduler.has_unfinished) == ((), False)


def test_one_request_from_prompt_to_last_token(make_loop, make_request, expected_output):
    loop, request = make_loop(), make_request(10, 5)
    loop.scheduler.add(request)
    first = loop.step()
    assert first.assignments[0].token_ids == tuple(request.prompt_token_ids)
    assert [(r.start, r.num_rows, r.samples, len(r.new_block_ids)) for r in first.rows] == [(0, 10, True, 1)]
    for position in range(10, 14):
        scheduled = loop.step()
        assert not scheduled.assignments
        assert [(r.start, r.num_rows, r.samples, r.new_block_ids) for r in scheduled.rows] == [(position, 1, True, ())]
    assert request.is_finished
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == expected_output(request, 5)
    assert (loop.cache.usage, loop.cache.num_free_slots) == (0.0, 8)


def test_a_prompt_is_cut_by_the_budget_and_only_its_last_chunk_samples(make_loop, make_request):
    loop, request = make_loop(max_num_batched_tokens=7), make_request(20)
    loop.scheduler.add(request)
    steps = [loop.step().rows[0] for _ in range(3)]
    assert [(r.start, r.num_rows, r.samples) for r in steps] == [(0, 7, False), (7, 7, False), (14, 6, True)]


def test_decode_rows_come_first_and_prompt_chunks_fill_the_budget(make_loop, make_request):
    loop = make_loop(max_num_batched_tokens=10)
    short, long, late = make_request(4, 9), make_request(25, 9), make_request(5, 9)
    add_all(loop, short, long, late)
    steps = [rows_by_id(loop.step()) for _ in range(5)]
    assert steps == [
        {"r0": 4, "r1": 6},
        {"r0": 1, "r1": 9},
        {"r0": 1, "r1": 9},
        {"r0": 1, "r1": 1, "r2": 5},
        {"r0": 1, "r1": 1, "r2": 1},
    ]


def test_an_older_prompt_chunk_comes_before_a_younger_one(make_loop, make_request):
    loop = make_loop(max_num_batched_tokens=10)
    add_all(loop, make_request(12), make_request(12))
    assert [rows_by_id(loop.step()) for _ in range(3)] == [{"r0": 10}, {"r0": 2, "r1": 8}, {"r1": 4}]


def test_row_schedule_caps_rows_and_leaves_the_budget_to_others(make_loop, make_request):
    loop = make_loop(max_num_batched_tokens=64)
    request, other = make_request(12, row_schedule=RowSchedule(chunk=4, decode_from=9)), make_request(30)
    add_all(loop, request, other)
    steps = [rows_by_id(loop.step()) for _ in range(6)]
    assert [s.get("r0") for s in steps] == [4, 4, 1, 1, 1, 1]
    assert steps[0]["r1"] == 30
    assert request.is_finished


def test_a_waiting_prompt_does_not_overtake(make_loop, make_request):
    loop = make_loop(num_blocks=4, max_num_batched_tokens=1000)
    first, large, small = make_request(200, 3), make_request(300, 1), make_request(5, 1)
    add_all(loop, first, large, small)
    assert rows_by_id(loop.step()) == {"r0": 200}
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 2)
    assert rows_by_id(loop.step()) == {"r0": 1}
    loop.step()
    assert first.is_finished
    assert rows_by_id(loop.step()) == {"r1": 300}
    assert large.is_finished
    assert rows_by_id(loop.step()) == {"r2": 5}


def test_admission_leaves_blocks_for_those_who_run(make_loop, make_request):
    loop = make_loop(num_blocks=4, max_num_batched_tokens=1000)
    add_all(loop, make_request(200, 9), make_request(200, 9))
    assert rows_by_id(loop.step()) == {"r0": 200}
    loop = make_loop(num_blocks=5, max_num_batched_tokens=1000)
    add_all(loop, make_request(200, 9), make_request(200, 9))
    assert len(loop.step().rows) == 2


def test_no_more_run_than_there_are_slots_or_rows(make_loop, make_request):
    for max_num_seqs, budget in ((3, 64), (64, 3)):
        loop = make_loop(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        requests = [make_request(1, 4) for _ in range(7)]
        add_all(loop, *requests)
        for _ in range(3):
            assert len(loop.step().rows) == 3
        loop.drain()
        assert all(len(request.output_token_ids) == 4 for request in requests)


def test_block_ids_are_sent_once_and_in_table_order(make_loop, make_request):
    loop, request = make_loop(num_blocks=6, shuffle_seed=1), make_request(200, 300)
    loop.scheduler.add(request)
    table = []
    while not request.is_finished:
        rows = loop.step().rows[0]
        assert rows.first_new_block == len(table)
        table.extend(rows.new_block_ids)
        assert request.is_finished or loop.cache.blocks("r0") == tuple(table)
    assert len(table) == 4


def test_the_latest_arrival_yields_and_resumes_with_all_its_tokens(make_loop, make_request, expected_output):
    loop = make_loop(num_blocks=3, max_num_batched_tokens=1000)
    old, young = make_request(100, 60), make_request(120, 60)
    add_all(loop, old, young)
    loop.steps_until(lambda: young.status is RequestStatus.PREEMPTED)
    kept = list(young.output_token_ids)
    assert (len(old.output_token_ids), len(kept)) == (30, 29)
    assert (young.num_computed_tokens, young.num_preemptions, loop.cache.blocks("r1")) == (0, 1, ())
    loop.steps_until(lambda: old.is_finished)
    again = loop.step()
    assert again.assignments[0].token_ids == tuple(young.prompt_token_ids + kept)
    assert [(r.start, r.num_rows, r.samples, r.first_new_block) for r in again.rows] == [(0, 149, True, 0)]
    loop.drain()
    assert old.output_token_ids == expected_output(old, 60)
    assert young.output_token_ids == expected_output(young, 60)
    assert (old.num_preemptions, young.num_preemptions, loop.scheduler.num_preemptions) == (0, 1, 1)


def test_the_latest_arrival_yields_itself_rather_than_an_older_one(make_loop, make_request, expected_output):
    loop = make_loop(num_blocks=4)
    old, young = make_request(250, 3, row_schedule=RowSchedule(chunk=1)), make_request(120, 200)
    add_all(loop, old, young)
    loop.steps_until(lambda: young.status is RequestStatus.PREEMPTED)
    assert (young.num_tokens, len(loop.cache.blocks("r0")), loop.cache.num_free_blocks) == (257, 2, 2)
    loop.drain()
    assert old.num_preemptions == 0
    assert young.output_token_ids == expected_output(young, 200)


def test_preempted_requests_return_in_order_of_arrival(make_loop, make_request):
    loop = make_loop(num_blocks=8, max_num_batched_tokens=1000)
    old, *others = requests = [make_request(120, 150) for _ in range(4)]
    add_all(loop, *requests, make_request(5))
    loop.steps_until(lambda: loop.scheduler.num_running == 4)
    loop.steps_until(lambda: loop.scheduler.num_preemptions >= 2)
    loop.drain()
    assert old.num_preemptions == 0
    assert any(request.num_preemptions for request in others)
    order = [request_id for request_id, _ in loop.runner.assignments]
    assert list(dict.fromkeys(order)) == ["r0", "r1", "r2", "r3", "r4"]


def test_a_lone_request_may_fill_the_cache_and_then_ends(make_loop, make_request, expected_output):
    loop, request = make_loop(num_blocks=1), make_request(120, None)
    loop.scheduler.add(request)
    loop.drain()
    assert (request.finish_reason, request.num_tokens, request.num_preemptions) == (FinishReason.LENGTH, 129, 0)
    assert request.output_token_ids == expected_output(request, 9)


@pytest.mark.parametrize(
    ("prompt_len", "kwargs", "words"),
    [
        (0, {}, ["no tokens"]),
        (100, {"max_total_tokens": 100}, ["100 tokens", "may have 100"]),
        (101, {"max_total_tokens": 100, "wants_prompt_logits": True}, ["101 tokens", "may have 100"]),
        (257, {}, ["257 tokens", "holds 256", "2 blocks"]),
    ],
)
def test_a_request_that_never_fits_fails_alone(make_loop, make_request, prompt_len, kwargs, words):
    loop = make_loop(num_blocks=2)
    bad, before, after = make_request(prompt_len, **kwargs), make_request(9, 3), make_request(9, 3)
    add_all(loop, before, bad, after)
    assert bad.is_finished
    assert bad.finish_reason is FinishReason.ERROR
    assert all(word in bad.error for word in words)
    loop.drain()
    assert before.finish_reason is after.finish_reason is FinishReason.LENGTH


def test_prompts_that_just_fit(make_loop, make_request):
    loop = make_loop(num_blocks=2)
    full_cache = make_request(256, 5)
    full_length = make_request(99, 5, max_total_tokens=100)
    scored = make_request(100, 5, max_total_tokens=100, wants_prompt_logits=True)
    add_all(loop, full_cache, full_length, scored)
    loop.drain()
    for request in (full_cache, full_length, scored):
        assert (request.finish_reason, len(request.output_token_ids)) == (FinishReason.LENGTH, 1)
    assert loop.runner.num_rows == 256 + 99 + 100


def test_ids_are_unique_among_unfinished_requests(make_loop, make_request):
    loop = make_loop()
    loop.scheduler.add(make_request(3, request_id="x"))
    with pytest.raises(InvalidRequest, match="request_id='x'"):
        loop.scheduler.add(make_request(3, request_id="x"))
    loop.drain()
    again = make_request(3, request_id="x")
    loop.scheduler.add(again)
    loop.drain()
    assert len(again.output_token_ids) == 1


def in_state(loop, make_request, state):
    """A request brought into a state, beside two others."""
    if state == "preempted":
        add_all(loop, make_request(100, 200), request := make_request(120, 200))
        loop.steps_until(lambda: request.status is RequestStatus.PREEMPTED)
        return request
    add_all(loop, make_request(3, 20), request := make_request(150, 2), make_request(3, 20))
    if state == "waiting":
        return request
    loop.step()
    assert (request.status, request.num_computed_tokens) == (RequestStatus.RUNNING, 61)
    if state == "inside its prompt":
        return request
    loop.steps_until(lambda: len(request.output_token_ids) == (1 if state == "decoding" else 2))
    return request


@pytest.mark.parametrize("state", ["waiting", "inside its prompt", "decoding", "preempted"])
@pytest.mark.parametrize("end", ["abort", "stop"])
def test_ending_a_request_from_outside_in_each_state(make_loop, make_request, state, end):
    loop = make_loop(num_blocks=3 if state == "preempted" else 8)
    request = in_state(loop, make_request, state)
    output = list(request.output_token_ids)
    if end == "abort":
        assert loop.scheduler.abort(request.request_id) is request
        assert (request.finish_reason, request.stop_reason) == (FinishReason.ABORT, None)
    else:
        assert loop.scheduler.stop(request.request_id, "\n\n") is request
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "\n\n")
    loop.scheduler.check_integrity()
    assert loop.cache.blocks(request.request_id) == ()
    loop.drain()
    assert request.output_token_ids == output
    assert (loop.cache.usage, loop.cache.num_free_slots) == (0.0, 8)


def test_ending_a_request_that_has_ended_or_never_was(make_loop, make_request):
    loop = make_loop()
    request = in_state(loop, make_request, "finished")
    assert request.is_finished
    for request_id in (request.request_id, "never was"):
        assert loop.scheduler.abort(request_id) is None
        assert loop.scheduler.stop(request_id, 3) is None
    assert request.finish_reason is FinishReason.LENGTH


def test_a_failing_request_fails_alone(make_loop, make_request, expected_output):
    loop = make_loop(max_num_batched_tokens=8)
    decoding, prompt, other = make_request(2, 9), make_request(30, 9), make_request(2, 9)
    add_all(loop, decoding, prompt, other)
    loop.step()
    loop.runner.failing = {"r0", "r1"}
    loop.step()
    for request in (decoding, prompt):
        assert (request.finish_reason, request.error) == (FinishReason.ERROR, "not a number in layer 3")
    loop.scheduler.check_integrity()
    loop.drain()
    assert other.output_token_ids == expected_output(other, 9)


def test_update_reports_who_advanced(make_loop, make_request):
    loop = make_loop(max_num_batched_tokens=8, depth=9)
    decoding, prompt = make_request(2, 9), make_request(30, 9)
    add_all(loop, decoding, prompt)
    loop.step()
    assert loop.update() == [decoding, prompt]
    assert (len(decoding.output_token_ids), len(prompt.output_token_ids)) == (1, 0)
    loop.step()
    loop.scheduler.abort("r0")
    assert loop.update() == [prompt]
    assert len(decoding.output_token_ids) == 1


def test_stop_ids_and_eos_end_a_request_with_the_token(make_loop, make_request, expected_output):
    loop = make_loop()
    by_eos, by_id = (
        make_request(3, 40, eos_token_ids=frozenset(range(25))),
        make_request(3, 40, stop_token_ids=tuple(range(25))),
    )
    add_all(loop, by_eos, by_id)
    loop.drain()
    for request in (by_eos, by_id):
        expected = expected_output(request, 40)
        length = next(i for i, token_id in enumerate(expected) if token_id < 25) + 1
        assert request.output_token_ids == expected[:length]
        assert request.finish_reason is FinishReason.STOP
    assert (by_eos.stop_reason, by_id.stop_reason) == (None, by_id.output_token_ids[-1])


def test_scheduling_ahead_goes_on_with_prompts_and_with_tokens_that_are_not_known_yet(
    make_loop, make_request, expected_output
):
    loop = make_loop(max_num_batched_tokens=10, depth=9)
    requests = [make_request(4, 4), make_request(25, 9)]
    add_all(loop, *requests)
    steps = [{"r0": 4, "r1": 6}, {"r0": 1, "r1": 9}, {"r0": 1, "r1": 9}, {"r0": 1, "r1": 1}, {"r1": 1}]
    assert [rows_by_id(loop.step()) for _ in range(5)] == steps  # the four tokens of r0 are on their way, none is known
    assert [request.num_tokens for request in requests] == [4, 25]
    loop.depth = 1
    loop.drain()
    assert [request.output_token_ids for request in requests] == [expected_output(r, r.params.max_tokens) for r in requests]


def test_a_stop_that_is_seen_late_costs_one_row(make_loop, make_request, expected_output):
    loop, request = make_loop(depth=2), make_request(4, 40)
    third = expected_output(request, 3)[-1]
    assert third not in expected_output(request, 2)
    stopping = make_request(4, 40, stop_token_ids=(third,))
    stopping.prompt_token_ids, stopping.seed = request.prompt_token_ids, request.seed
    loop.scheduler.add(stopping)
    loop.drain()
    assert stopping.output_token_ids == expected_output(request, 3)
    assert loop.runner.num_rows == 4 + 2 + 1


def test_scheduling_ahead_admits_no_more_than_can_decode_together(make_loop, make_request, expected_output):
    loop = make_loop(max_num_batched_tokens=3, depth=9)
    requests = [make_request(1, 4) for _ in range(7)]
    add_all(loop, *requests)
    assert [len(loop.step().rows) for _ in range(5)] == [3, 3, 3, 3, 0]
    for _ in range(4):
        loop.update()
    assert len(loop.step().rows) == 3
    loop.depth = 2
    loop.drain()
    assert all(request.output_token_ids == expected_output(request, 4) for request in requests)


def test_a_request_sent_back_in_a_step_has_no_rows_in_it(make_loop, make_request, expected_output):
    loop = make_loop(num_blocks=4, max_num_batched_tokens=1000, depth=9)
    older, old = make_request(127, 9), make_request(127, 9)
    add_all(loop, older, old)
    loop.step()
    young = make_request(1, 9)
    loop.scheduler.add(young)
    assert rows_by_id(loop.step()) == {older.request_id: 1, old.request_id: 1, young.request_id: 1}
    assert rows_by_id(loop.step()) == {older.request_id: 1, old.request_id: 1}
    assert young.status is RequestStatus.PREEMPTED
    loop.scheduler.check_integrity()
    loop.depth = 2
    loop.drain()
    assert young.output_token_ids == expected_output(young, 9)


def test_late_results_do_not_reach_a_new_request_with_the_same_id(make_loop, make_request, expected_output):
    loop = make_loop(depth=9)
    loop.scheduler.add(make_request(4, 9, request_id="x"))
    loop.step()
    loop.scheduler.abort("x")
    new = make_request(6, 3, request_id="x")
    loop.scheduler.add(new)
    loop.step()
    assert loop.update() == []
    assert new.output_token_ids == []
    assert loop.update() == [new]
    loop.depth = 1
    loop.drain()
    assert new.output_token_ids == expected_output(new, 3)


def test_a_late_token_of_a_preempted_request_is_drawn_again(make_loop, make_request, expected_output):
    loop = make_loop(num_blocks=3, max_num_batched_tokens=1000, depth=2)
    old, young = make_request(60, 90), make_request(120, 90)
    loop.scheduler.add(old)
    loop.step()
    loop.scheduler.add(young)
    while young.status is not RequestStatus.PREEMPTED:
        _, result_in_flight = loop.pending[-1]
        loop.step()
    num_kept = len(young.output_token_ids)
    assert result_in_flight.sampled["r1"][0].token_id == expected_output(young, 90)[num_kept]
    loop.drain()
    assert young.output_token_ids == expected_output(young, 90)
    assert old.output_token_ids == expected_output(old, 90)
