"""Sampling against distributions worked out by hand in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from abyssal.core.batch import SampledToken
from abyssal.core.sampling_params import SamplingParams
from abyssal.runner.sampler import SamplingRow, draw, sample, support, token_logprobs

LOGITS = np.log(np.array([0.05, 0.4, 0.3, 0.2, 0.05], np.float32))


def test_greedy_takes_the_lowest_id_of_equals():
    row = SamplingRow(SamplingParams(temperature=0.0), 1, 1)
    assert draw(np.array([1.0, 3.0, 3.0, 2.0], np.float32), row) == 1


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3]),  # 0 and 4 tie: the lowest id stays
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.69}, [1, 2]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_p": 1e-9}, [1]),
        ({"top_k": 2, "top_p": 0.57}, [1]),  # 0.4 of 0.7 is 0.571: top-p counts in what top-k kept
        ({"min_p": 0.6}, [1, 2]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.49, "top_k": 3}, [1, 2, 3]),
    ],
)
def test_support(params, kept):
    assert support(LOGITS.astype(np.float64), SamplingParams(**params)).tolist() == kept


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 3])
def test_draws_follow_the_distribution(temperature, top_k):
    params = SamplingParams(temperature=temperature, top_k=top_k)
    wanted = np.array([0.05, 0.4, 0.3, 0.2, 0.05]) ** (1 / temperature)
    if top_k:
        wanted[[0, 4]] = 0
    wanted /= wanted.sum()
    count = 8000
    drawn = np.bincount([draw(LOGITS, SamplingRow(params, 3, p)) for p in range(count)], minlength=5)
    assert drawn[wanted == 0].sum() == 0
    kept = wanted > 0
    chi2 = ((drawn[kept] - count * wanted[kept]) ** 2 / (count * wanted[kept])).sum()
    # 0.01% level of chi-square with 2 and 4 degrees of freedom
    assert chi2 < (18.4 if top_k else 23.5)


def test_a_row_does_not_depend_on_its_neighbours():
    generator = np.random.default_rng(0)
    logits = torch.from_numpy(generator.normal(size=(6, 300)).astype(np.float32))
    rows = [
        SamplingRow(SamplingParams(), 7, 11),
        SamplingRow(SamplingParams(top_k=1), 7, 11),
        SamplingRow(SamplingParams(temperature=0.0), 7, 11),
        SamplingRow(SamplingParams(top_p=0.5, logprobs=2), 8, 11),
        SamplingRow(SamplingParams(min_p=0.3), 9, 12),
        SamplingRow(SamplingParams(temperature=3.0), 7, 13),
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone


def test_a_row_that_is_not_numbers_fails_alone():
    logits = torch.zeros(3, 8)
    logits[1, 5] = torch.nan
    row = SamplingRow(SamplingParams(temperature=0.0), 1, 1)
    results = sample(logits, [row, row, row])
    assert isinstance(results[1], str)
    assert results[0] == results[2] == SampledToken(0)


def test_logprobs_are_of_the_raw_logits():
    logits = np.array([2.0, 0.5, 0.5, -1.0], np.float32)
    wanted = torch.log_softmax(torch.from_numpy(logits).double(), 0).numpy()
    entry = token_logprobs(logits, 2, 3)
    assert entry.rank == 3  # ids 0 and, tied, 1 come first
    assert entry.logprob == pytest.approx(wanted[2], abs=1e-6)
    assert [i for i, _ in entry.top] == [0, 1, 2]
    assert [p for _, p in entry.top] == pytest.approx(wanted[[0, 1, 2]], abs=1e-6)
