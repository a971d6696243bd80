"""Native sampling against the numpy reference, bit for bit, on rows with everything that can be in them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from abyssal.backends.cpu import native
from abyssal.backends.cpu import sampling as reference
from abyssal.backends.cpu.native.sampling import SamplingKernels
from abyssal.ops.sampling import Cuts, Filters, LogitAdjustments

VARIANTS = [v for v in native.runnable_variants() if native.library_path(v)]
VOCABS = [1, 5, 31, 64, 257, 1000, 4099]


@pytest.fixture(scope="module", params=VARIANTS or [None])
def library(request):
    if request.param is None:
        pytest.skip("no native library was built")
    return native.load(request.param)


@pytest.fixture(params=[1, 2])
def kernels(request, library) -> SamplingKernels:
    library.abyssal_set_num_threads(request.param)
    yield SamplingKernels(library)
    library.abyssal_set_num_threads(1)


def logits_of(vocab: int, seed: int) -> torch.Tensor:
    """float32 [9, vocab]: smooth, steep, tied, masked, all equal, all masked, and rows that are no numbers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(9, vocab)).astype(np.float32) * np.array([[1], [30], [2], [3], [0], [1], [1], [1], [5]], np.float32)
    x[2] = np.round(x[2])
    x[3, rng.random(vocab) < 0.6] = -np.inf
    x[5] = -np.inf
    x[6, rng.integers(vocab)] = np.nan
    x[7, rng.integers(vocab)] = np.inf
    return torch.from_numpy(x)


def filters_of(vocab: int, seed: int, num_rows: int) -> Filters:
    rng = np.random.default_rng(seed)
    pick = lambda *choices: rng.choice(choices, num_rows)  # noqa: E731
    return Filters(
        temperature=torch.from_numpy(pick(0.0, 0.3, 1.0, 1.0, 2.5)),
        top_k=torch.from_numpy(np.minimum(pick(1, 2, 7, 50, 2000, vocab), vocab).astype(np.int32)),
        top_p=torch.from_numpy(pick(1.0, 0.999, 0.9, 0.5, 1e-6)),
        min_log_ratio=torch.from_numpy(pick(-math.inf, -math.inf, math.log(0.01), math.log(0.5), 0.0)),
        joint=torch.from_numpy(rng.random(num_rows) < 0.5),
    )


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bit for bit, NaN being NaN."""
    got, want = got.numpy(), want.numpy()
    return got.dtype == want.dtype and got.shape == want.shape and np.array_equal(got, want, equal_nan=got.dtype.kind == "f")


def adjustments_of(vocab: int, seed: int, num_rows: int, num_words: int) -> LogitAdjustments:
    rng = np.random.default_rng(seed)
    rows, ids = [], []
    for row in range(num_rows):
        own = rng.choice(vocab, min(vocab, int(rng.integers(0, 6))), replace=False)
        rows += [row] * len(own)
        ids += own.tolist()
    masked = np.flatnonzero(rng.random(num_rows) < 0.7).astype(np.int32)
    masks = rng.integers(-(2**31), 2**31, (len(masked), num_words), dtype=np.int64).astype(np.int32)
    masks[rng.random(masks.shape) < 0.2] = -1
    masks[rng.random(masks.shape) < 0.2] = 0
    draw = lambda *values: torch.from_numpy(rng.choice(values, len(ids)).astype(np.float32))  # noqa: E731
    return LogitAdjustments(
        rows=torch.tensor(rows, dtype=torch.int32),
        ids=torch.tensor(ids, dtype=torch.int32),
        divisor=draw(1, 1.3, 0.5, 1e-38),
        minus=draw(0, 0.5, -2, 7),
        plus=draw(0, 100, -100, 3e38),
        masked=torch.from_numpy(masked),
        masks=torch.from_numpy(masks),
    )


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("seed", range(3))
def test_adjust(kernels, vocab: int, seed: int) -> None:
    logits, rows = logits_of(vocab, seed), torch.tensor([8, 0, 0, 2, 6, 1, 3], dtype=torch.int32)
    words = -(-vocab // 32)
    for num_words in {words, max(1, words - 1)}:
        adjustments = adjustments_of(vocab, seed, len(rows), num_words)
        before = logits.clone()
        got = kernels.adjust_logits(logits, rows, adjustments)
        assert same(got, reference.adjust_logits(logits, rows, adjustments))
        assert same(logits, before)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("seed", range(12))
def test_cut_and_draw(kernels, vocab: int, seed: int) -> None:
    logits = logits_of(vocab, seed)
    rows = torch.from_numpy(np.random.default_rng(seed).integers(0, 9, 24).astype(np.int32))
    filters = filters_of(vocab, seed, len(rows))
    cuts, wanted = kernels.cut_tokens(logits, rows, filters), reference.cut_tokens(logits, rows, filters)
    for i, row in enumerate(rows.tolist()):
        if filters.temperature[i] > 0 and row not in (5, 6, 7):
            mine, theirs = (
                reference.kept_tokens(logits[row].numpy(), float(c.values[i]), int(c.ids[i])) for c in (cuts, wanted)
            )
            possible = logits[row].numpy() > -np.inf
            assert np.array_equal(mine & possible, theirs & possible), f"row {i}"
    seeds = torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63, len(rows), dtype=np.int64))
    positions = torch.arange(len(rows), dtype=torch.int32) * 1000
    for masked in (False, True):
        arguments = (logits, rows, filters.temperature, wanted, seeds, positions, masked)
        assert same(kernels.draw_tokens(*arguments), reference.draw_tokens(*arguments))


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_of_many_seeds(kernels, vocab: int) -> None:
    """Blocks that no noise could lift are skipped: never one that noise does lift."""
    logits = logits_of(vocab, 1)
    rows = torch.full((300,), 8, dtype=torch.int32)
    cuts = Cuts(torch.full((300,), -math.inf), torch.full((300,), -1, dtype=torch.int32))
    for temperature in (0.5, 20.0):
        arguments = (
            logits,
            rows,
            torch.full((300,), temperature, dtype=torch.float64),
            cuts,
            torch.arange(300),
            torch.arange(300, dtype=torch.int32),
            False,
        )
        assert same(kernels.draw_tokens(*arguments), reference.draw_tokens(*arguments))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_ranks(kernels, vocab: int, num_top: int) -> None:
    logits, num_top = logits_of(vocab, num_top), min(num_top, vocab)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 8], dtype=torch.int32)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab, len(rows)))
    temperature = torch.tensor([1.0, 0.2, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.7], dtype=torch.float64)
    got = kernels.rank_tokens(logits, rows, temperature, ids, num_top)
    want = reference.rank_tokens(logits, rows, temperature, ids, num_top)
    assert same(got[1], want[1])
    exists = ~(want[3] == -math.inf)  # masked tokens may be listed or not
    assert same(got[2][exists], want[2][exists])
    for mine, theirs in ((got[0], want[0]), (got[3], want[3])):
        assert np.allclose(mine.numpy(), theirs.numpy(), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_rows_know_nothing_of_each_other(kernels) -> None:
    logits, rows = logits_of(4099, 0), torch.tensor([0, 1, 2, 3, 4, 8, 8, 0], dtype=torch.int32)
    filters = filters_of(4099, 0, len(rows))
    seeds, positions = torch.arange(8), torch.arange(8, dtype=torch.int32)
    ids, one = torch.arange(8), torch.ones(8, dtype=torch.float64)
    cuts = kernels.cut_tokens(logits, rows, filters)
    drawn = kernels.draw_tokens(logits, rows, filters.temperature, cuts, seeds, positions, True)
    ranked = kernels.rank_tokens(logits, rows, one, ids, 5)
    for i in range(8):
        at = slice(i, i + 1)
        alone = logits[rows[i : i + 1].long()].clone()
        zero = torch.zeros(1, dtype=torch.int32)
        own = Filters(*(getattr(filters, name)[at] for name in ("temperature", "top_k", "top_p", "min_log_ratio", "joint")))
        cut = kernels.cut_tokens(alone, zero, own)
        if filters.temperature[i] > 0:
            assert same(cut.values, cuts.values[at])
            assert same(cut.ids, cuts.ids[at])
        token = kernels.draw_tokens(alone, zero, own.temperature, cut, seeds[at], positions[at], True)
        assert same(token, drawn[at])
        for mine, theirs in zip(kernels.rank_tokens(alone, zero, one[at], ids[at], 5), ranked, strict=True):
            assert same(mine, theirs[at])
