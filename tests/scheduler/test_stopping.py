"""Stop rules, one line each: output so far, parameters, and what must come of the newest token."""

import pytest

from abyssal.core.request import FinishReason, Request
from abyssal.core.sampling_params import SamplingParams
from abyssal.scheduler.stopping import check_stop

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = 1

CASES = {
    "goes on": ([5, 6], {}, None),
    "eos": ([5, EOS], {}, (STOP, None)),
    "second eos id": ([5, 2], {}, (STOP, None)),
    "eos earlier is not looked at again": ([EOS, 5], {}, None),
    "eos ignored": ([5, EOS], {"ignore_eos": True}, None),
    "stop id": ([5, 9], {"stop_token_ids": (8, 9)}, (STOP, 9)),
    "stop id though eos is ignored": ([5, 9], {"stop_token_ids": (9,), "ignore_eos": True}, (STOP, 9)),
    "eos that is a stop id, too": ([5, EOS], {"stop_token_ids": (EOS,)}, (STOP, None)),
    "ignored eos that is a stop id": ([5, EOS], {"stop_token_ids": (EOS,), "ignore_eos": True}, (STOP, EOS)),
    "max_tokens not yet": ([5, 6], {"max_tokens": 3}, None),
    "max_tokens": ([5, 6, 7], {"max_tokens": 3}, (LENGTH, None)),
    "max_tokens of one": ([5], {"max_tokens": 1}, (LENGTH, None)),
    "eos at max_tokens": ([5, 6, EOS], {"max_tokens": 3}, (STOP, None)),
    "stop id at max_tokens": ([5, 6, 9], {"max_tokens": 3, "stop_token_ids": (9,)}, (STOP, 9)),
    "eos before min_tokens": ([5, EOS], {"min_tokens": 3}, None),
    "stop id before min_tokens": ([5, 9], {"min_tokens": 3, "stop_token_ids": (9,)}, None),
    "eos as the token that reaches min_tokens": ([5, 6, EOS], {"min_tokens": 3}, (STOP, None)),
    "max_tokens equal to min_tokens": ([5, 6, 7], {"min_tokens": 3, "max_tokens": 3}, (LENGTH, None)),
    "total length not yet": ([5] * 5, {}, None),
    "total length": ([5] * 6, {}, (LENGTH, None)),
    "eos at total length": ([5] * 5 + [EOS], {}, (STOP, None)),
    "total length before min_tokens": ([5] * 6, {"min_tokens": 50}, (LENGTH, None)),
    "eos at total length before min_tokens": ([5] * 5 + [EOS], {"min_tokens": 50}, (LENGTH, None)),
    "total length before max_tokens": ([5] * 6, {"max_tokens": 50}, (LENGTH, None)),
}


@pytest.mark.parametrize(("output", "params", "expected"), CASES.values(), ids=CASES.keys())
def test_stop_rule(output, params, expected):
    request = Request("r", [3, 3, 3, 3], SamplingParams(**params), 0, 10, frozenset({EOS, 2}), output_token_ids=output)
    assert check_stop(request, max_total_tokens=10) == expected
