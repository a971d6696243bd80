"""What SamplingParams accepts, what it refuses and how it says so."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace

import pytest

from abyssal.core.errors import InvalidRequest
from abyssal.core.sampling_params import MAX_LOGPROBS, SamplingParams

REFUSED = [
    ("temperature", [-0.1, math.nan, math.inf, "1", True, None, 10**400]),
    ("top_p", [0, -0.5, 1.01, math.nan, "0.5"]),
    ("top_k", [-2, 2**31, 1.0, True, "3"]),
    ("min_p", [-0.01, 1.5, math.nan]),
    ("top_k_top_p", ["both", None]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1, math.inf]),
    ("repetition_penalty", [0, -1, math.inf]),
    ("logit_bias", [3, {1: "a"}, {1: 101}, {1: math.nan}, {-1: 1}, {"x": 1}, {"1": 1, 1: 2}, [(1, 2, 3)], {True: 1}]),
    ("allowed_token_ids", [[], "12", [1.5], [-1], 7]),
    ("bad_words", ["word", [""], [" "], [[]], [[1, "a"]], [3], [[-1]]]),
    ("n", [0, -1, 16385, 1.0, True]),
    ("seed", [-(2**63) - 1, 2**64, 1.5, True, "5"]),
    ("max_tokens", [0, -1, 2**31, 3.0]),
    ("min_tokens", [-1, None, 2**31]),
    ("thinking_token_budget", [-1, 2**31, 0.5]),
    ("stop", ["", [""], [3], 7]),
    ("stop_token_ids", [[-1], "3", [True], 4]),
    ("ignore_eos", [1, None, "yes"]),
    ("logprobs", [-1, MAX_LOGPROBS + 1, True, 1.0]),
    ("prompt_logprobs", [-1, MAX_LOGPROBS + 1]),
    ("logprobs_mode", ["raw_logprobs", None]),
    ("detokenize", [0]),
    ("skip_special_tokens", ["no"]),
    ("include_stop_str_in_output", [None]),
]


def test_every_parameter_has_refused_values():
    assert [name for name, _ in REFUSED] == [f.name for f in fields(SamplingParams)]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED for value in values], ids=repr)
def test_refusals_name_parameter_and_value(name, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter.partition("[")[0] == name
    assert str(caught.value).startswith(name)
    assert "must" in str(caught.value) or "names" in str(caught.value)


def test_a_refusal_shows_the_range():
    with pytest.raises(InvalidRequest, match=r"^frequency_penalty=3: must be a finite number in \[-2, 2\]$"):
        SamplingParams(frequency_penalty=3)
    with pytest.raises(InvalidRequest, match=r"^top_p=0: must be a finite number in \(0, 1\]$"):
        SamplingParams(top_p=0)


@pytest.mark.parametrize(
    ("values", "culprit"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": ["a"], "detokenize": False}, "stop"),
        ({"n": 2, "temperature": 0.0}, "n"),
    ],
)
def test_parameters_that_do_not_go_together(values, culprit):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)
    assert caught.value.parameter == culprit


def test_collections_become_tuples():
    params = SamplingParams(
        stop="x",
        stop_token_ids=[4, 3, 4],
        allowed_token_ids=[9, 9, 2],
        bad_words=["no", [5, 6], "no"],
        logit_bias={"7": 1, 3: -2.5},
    )
    assert params.stop == ("x",)
    assert params.stop_token_ids == (4, 3)
    assert params.allowed_token_ids == (9, 2)
    assert params.bad_words == ("no", (5, 6))
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert hash(params) == hash(replace(params))


def test_none_stands_for_nothing_where_other_engines_use_it():
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None)
    assert params == SamplingParams()


def test_from_dict_refuses_what_it_does_not_know():
    with pytest.raises(InvalidRequest, match=r"temprature=0\.5: unknown sampling parameter; known are allowed_token_ids, "):
        SamplingParams.from_dict({"temprature": 0.5})
    params = SamplingParams(temperature=0.3, logit_bias={5: 1.0}, bad_words=["a", [1, 2]], seed=-3)
    assert SamplingParams.from_dict(asdict(params)) == params


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy == greedy


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_any_64_bit_seed(seed):
    assert SamplingParams(seed=seed).seed == seed
