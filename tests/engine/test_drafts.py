"""Output with drafts is output without them: tokens, log-probabilities, texts and reasons, bit for bit where kernels are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from abyssal.config.engine import EngineConfig
from abyssal.core.errors import ConfigError
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.engine import Engine
from abyssal.runner.drafting import Drafts


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(11, 400) for _ in range(count)]


def random_request(seed: int) -> tuple[list[int], SamplingParams]:
    rng = random.Random(seed)
    params = SamplingParams(
        temperature=seed % 2 * 1.0,
        top_p=rng.choice((1.0, 1.0, 0.9)),
        top_k=rng.choice((0, 0, 20)),
        seed=seed,
        max_tokens=rng.choice((1, 2, 3, 9, 20, 35)),
        min_tokens=rng.choice((0, 0, 1)),
        stop_token_ids=tuple(random_ids(rng, 12)) if rng.random() < 0.3 else (),
        logprobs=rng.choice((0, 0, 3)),
        prompt_logprobs=0 if rng.random() < 0.1 else None,
        detokenize=False,
    )
    return random_ids(rng, rng.choice((1, 2, 15, 16, 17, 40, 90))), params


def outcome(output) -> tuple:
    completion = output.outputs[0]
    return (
        completion.token_ids,
        completion.logprobs,
        completion.finish_reason,
        completion.stop_reason,
        output.prompt_logprobs,
    )


def run(
    engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]], *, in_flight: int | None = None
) -> list[tuple]:
    """What comes of each request, added as others end if not all at once."""
    waiting, order, done = list(enumerate(requests)), {}, {}
    while waiting or engine.has_unfinished:
        while waiting and (in_flight is None or len(order) - len(done) < in_flight):
            index, (prompt, params) = waiting.pop(0)
            order[engine.add(prompt, params)] = index
        for output in engine.step():
            if output.finished:
                done[order[output.request_id]] = outcome(output)
        engine.check_integrity()
    return [done[i] for i in range(len(requests))]


COMMON = {"num_threads": 1, "max_num_seqs": 12}
ROOMY = {"num_blocks": 64, "max_num_batched_tokens": 256}
TIGHT = {"num_blocks": 5, "max_num_batched_tokens": 24}


def continuation_oracle(outputs: list[int], prompt_len: int, right: int | None = None):
    """Drafts what the only request is known to generate; the first `right` of them, and then something else."""

    def oracle(request, drafts):
        first = request.position + 1 - prompt_len
        ids = outputs[first : first + len(drafts.token_ids)]
        ids += [0] * (len(drafts.token_ids) - len(ids))
        if right is not None:
            ids = [t if k < right else (t + 1) % 400 for k, t in enumerate(ids)]
        return Drafts(ids, drafts.confidence)

    return oracle


@pytest.fixture(scope="module")
def drafting_engine(checkpoint_of):
    """Engines with a drafter, by preset; `set_speculation` changes what they do."""
    engines: dict[str, Engine] = {}

    def make(preset: str) -> Engine:
        if preset not in engines:
            engines[preset] = Engine(checkpoint_of(preset), EngineConfig(speculation=1, **COMMON, **ROOMY))
        return engines[preset]

    return make


@pytest.fixture(scope="module")
def expected_of(checkpoint_of):
    """What requests give in an engine without a drafter."""
    cache: dict[tuple[str, int], list[tuple]] = {}

    def make(preset: str, num_requests: int) -> list[tuple]:
        key = (preset, num_requests)
        if key not in cache:
            engine = Engine(checkpoint_of(preset), EngineConfig(**COMMON, **ROOMY))
            cache[key] = run(engine, [random_request(i) for i in range(num_requests)])
        return cache[key]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [1, 2, 3, "auto"])
@pytest.mark.parametrize("settings", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_micro_equals_off(checkpoint_of, expected_of, speculation, settings):
    expected = expected_of("micro", 200)
    engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=speculation, **COMMON, **settings), shuffle_seed=1)
    assert run(engine, [random_request(i) for i in range(200)]) == expected
    assert speculation == "auto" or sum(place.accepted for place in engine.stats.speculation.places) > 20


@pytest.mark.parametrize("speculation", [3, "auto"])
def test_equal_through_preemption(checkpoint_of, speculation):
    """Five blocks for four requests that want two each."""
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=60, ignore_eos=True, logprobs=0) for i in range(4)]
    requests = [(random_ids(random.Random(i), 90 + 7 * i), own) for i, own in enumerate(params)]
    outcomes = []
    for setting, settings in (("off", ROOMY), (speculation, {"num_blocks": 5, "max_num_batched_tokens": 96})):
        engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=setting, **COMMON, **settings), shuffle_seed=1)
        outcomes.append(run(engine, requests))
    assert outcomes[0] == outcomes[1]
    assert engine.stats.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [1, 2, 3, 4, 5, "auto"])
@pytest.mark.parametrize("settings", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_deep_equals_off(checkpoint_of, expected_of, speculation, settings):
    expected = expected_of("deep", 200)
    engine = Engine(checkpoint_of("deep"), EngineConfig(speculation=speculation, **COMMON, **settings), shuffle_seed=1)
    assert run(engine, [random_request(i) for i in range(200)]) == expected
    assert speculation == "auto" or sum(place.accepted for place in engine.stats.speculation.places) > 20


@pytest.mark.parametrize("in_flight", [1, 3])
def test_whatever_runs_beside_it(drafting_engine, expected_of, in_flight):
    engine = drafting_engine("micro")
    engine.set_speculation(3)
    count = 12 * in_flight
    assert run(engine, [random_request(i) for i in range(count)], in_flight=in_flight) == expected_of("micro", 200)[:count]


@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_any_number_of_accepted_drafts(drafting_engine, preset):
    """Forced acceptance of 0 to all drafts: output as without drafts, in as many steps as that takes."""
    engine, block = drafting_engine(preset), drafting_engine(preset).model_config.text.dspark_block_size
    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=1 + 4 * (block + 1), ignore_eos=True, logprobs=2, detokenize=False
    )
    prompt = random_ids(random.Random(3), 21)
    engine.set_speculation("off")
    ((tokens, *_),) = expected = run(engine, [(prompt, params)])
    for right in range(block + 1):
        engine.set_speculation(block)
        engine.set_draft_oracle(continuation_oracle(tokens, 21, right))
        assert run(engine, [(prompt, params)]) == expected
        # the last step may draw fewer tokens than its drafts would give
        assert engine.stats.speculation.num_steps == -(-(len(tokens) - 1) // (right + 1))


TEXTS = ["The model caches", "expert 专家", "verify the window"]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_inside_an_accepted_run(drafting_engine, include):
    """The stop string ends at any token of a run; everything behind it is dropped."""
    engine = drafting_engine("micro")
    engine.set_speculation("off")
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    stops = []
    for text in TEXTS:
        engine.add(text, free)
        outputs = finish(engine)
        generated = outputs[0].outputs[0].text
        stops += [(text, generated[i : i + 4]) for i in (3, 9, 17, 30) if generated[i : i + 4].strip()]
    num_cut = 0
    for text, stop in stops:
        params = SamplingParams(
            temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,), include_stop_str_in_output=include, logprobs=1
        )
        engine.set_speculation("off")
        engine.add(text, params)
        (expected,) = finish(engine)
        engine.add(text, free)
        (whole,) = finish(engine)
        engine.set_speculation(3)
        engine.set_draft_oracle(continuation_oracle(whole.outputs[0].token_ids, len(whole.prompt_token_ids)))
        engine.add(text, params)
        (got,) = finish(engine)
        assert got.outputs == expected.outputs
        assert got.outputs[0].stop_reason == stop
        num_cut += len(got.outputs[0].token_ids) % 4 != 1
    assert num_cut > 2


def finish(engine: Engine) -> list:
    done = []
    while engine.has_unfinished:
        done += [output for output in engine.step() if output.finished]
        engine.check_integrity()
    return done


@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": 2},
        {"max_tokens": 7},
        {"max_tokens": 30, "stop_token_ids": "seventh"},
        {"max_tokens": 30, "min_tokens": 9, "stop_token_ids": "seventh"},
        {"max_tokens": 30, "stop": "text of the eighth", "stop_token_ids": "ninth"},
    ],
    ids=["2 tokens", "7 tokens", "stop id", "min_tokens", "stop string before a stop id"],
)
def test_ends_inside_an_accepted_run(drafting_engine, limits):
    engine = drafting_engine("micro")
    engine.set_speculation("off")
    prompt = random_ids(random.Random(8), 30)
    engine.add(prompt, SamplingParams(temperature=1.0, seed=4, max_tokens=31, ignore_eos=True, min_tokens=31))
    tokens = finish(engine)[0].outputs[0].token_ids
    limits = dict(limits)
    places = {"seventh": 6, "ninth": 8}
    if "stop_token_ids" in limits:
        limits["stop_token_ids"] = (tokens[places[limits["stop_token_ids"]]],)
    if "stop" in limits:
        limits["stop"] = engine.tokenizer.decode(tokens[7:8])
        if not limits["stop"].strip():
            pytest.skip("the eighth token has no text")
    params = SamplingParams(temperature=1.0, seed=4, ignore_eos=True, logprobs=0, **limits)
    engine.add(prompt, params)
    (expected,) = finish(engine)
    engine.set_speculation(3)
    engine.set_draft_oracle(continuation_oracle(tokens, 30))
    engine.add(prompt, params)
    (got,) = finish(engine)
    assert got.outputs == expected.outputs


def test_score_and_prompt_rows_do_not_change(drafting_engine):
    engine = drafting_engine("micro")
    ids = random_ids(random.Random(1), 100)
    engine.set_speculation("off")
    plain = engine.score(ids, chunk=13)
    engine.set_speculation(3)
    engine.add(random_ids(random.Random(2), 5), SamplingParams(max_tokens=60, ignore_eos=True, seed=1, detokenize=False))
    for _ in range(4):
        engine.step()
    assert torch.equal(engine.score(ids, chunk=13), plain)
    assert torch.equal(engine.score(ids, decode_from=40), plain)
    finish(engine)


def test_others_are_unaffected_by_aborts(drafting_engine, expected_of):
    engine, rng = drafting_engine("micro"), random.Random(5)
    engine.set_speculation(3)
    order = {engine.add(*random_request(i)): i for i in range(60)}
    aborted, done = set(), {}
    while engine.has_unfinished:
        if rng.random() < 0.5:
            candidates = [name for name in order if name not in done and name not in aborted]
            if candidates:
                aborted.add(rng.choice(candidates))
                engine.abort(sorted(aborted - set(done))[-1])
        for output in engine.step():
            if output.finished:
                done[output.request_id] = outcome(output)
        engine.check_integrity()
    expected = expected_of("micro", 200)
    kept = [name for name, result in done.items() if result[2] != "abort"]
    assert len(kept) > 15
    assert len(done) - len(kept) > 5
    for name in kept:
        assert done[name] == expected[order[name]]
    for name in set(done) - set(kept):
        tokens = done[name][0]
        assert tokens == expected[order[name]][0][: len(tokens)]


def test_rejection_is_greedy_where_that_is_asked_for(checkpoint_of, expected_of):
    settings = EngineConfig(speculation=3, acceptance="rejection", **COMMON, **TIGHT)
    engine = Engine(checkpoint_of("micro"), settings, shuffle_seed=2)
    got = run(engine, [random_request(i) for i in range(60)])
    expected = expected_of("micro", 200)
    for i in range(0, 60, 2):
        assert got[i] == expected[i]
    assert any(got[i] != expected[i] for i in range(1, 60, 2))  # only the distribution is the same
    assert engine.stats.speculation.tokens_per_step > 1.02


@pytest.mark.parametrize("speculation", [4, "7", 1000])
def test_more_than_the_trained_block_is_refused(checkpoint_of, speculation):
    with pytest.raises(ConfigError, match=r"trained to draft 3 tokens.*at most 3"):
        Engine(checkpoint_of("micro"), EngineConfig(speculation=speculation))


@pytest.mark.parametrize("speculation", [0, -1, True, "on", "", "1.5", 2.0])
def test_settings_that_mean_nothing(speculation):
    with pytest.raises(ConfigError, match="speculation="):
        EngineConfig(speculation=speculation)


def test_changing_speculation(checkpoint_of, drafting_engine):
    engine = drafting_engine("micro")
    with pytest.raises(ConfigError, match="at most 3"):
        engine.set_speculation(4)
    engine.add([20, 21], SamplingParams(max_tokens=5, detokenize=False))
    with pytest.raises(ConfigError, match="unfinished"):
        engine.set_speculation("off")
    finish(engine)
    engine.set_speculation("off")
    assert engine.stats.speculation is None
    plain = Engine(checkpoint_of("micro"), EngineConfig(**COMMON, **ROOMY))
    plain.set_speculation("off")
    with pytest.raises(ConfigError, match="without a drafter"):
        plain.set_speculation("auto")
