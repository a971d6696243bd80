"""Every sampling parameter against a plain float64 reference: exact probabilities, and draws by a chi-square test."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from abyssal.backends.cpu.table import cpu_table
from abyssal.core.sampling_params import SamplingParams
from abyssal.runner.logit_rules import LogitRules, TokenRoles
from abyssal.runner.sampler import NOT_FINITE, Sampler, SamplingRow

VOCAB = 12
EOS, THINK, THINK_END = 1, 2, 3
ROLES = TokenRoles(VOCAB, frozenset({EOS}), THINK, THINK_END)
LOGITS = np.random.default_rng(4).normal(size=VOCAB).astype(np.float32) * 2
PROMPT, OUTPUT = [5, 6, 7, 5], [7, 8, 8, 9]


@pytest.fixture(scope="module", params=["torch", "native"])
def sampler(request) -> Sampler:
    from abyssal.backends.cpu import native

    if request.param == "native" and native.load() is None:
        pytest.skip("no native library was built")
    return Sampler(cpu_table(request.param, 1), ROLES)


def row_of(
    sampler: Sampler, seed: int = 0, position: int = 0, drafted=(), mask=None, output=OUTPUT, **settings
) -> SamplingRow:
    params = SamplingParams(**settings)
    rules = sampler.rules_of(params, [*PROMPT, *output], len(PROMPT))
    return SamplingRow(params, seed, position, rules, tuple(drafted), mask)


def adjusted(logits, settings: dict, output=OUTPUT, drafted=(), allowed=None) -> np.ndarray:
    """Logits float64 after penalties, bias and masks, written out."""
    written = [*output, *drafted]
    x = np.array(logits, np.float64)
    for v in range(len(x)):
        if v in PROMPT or v in written:
            repetition = settings.get("repetition_penalty", 1.0)
            x[v] = x[v] / repetition if x[v] > 0 else x[v] * repetition
        count = written.count(v)
        x[v] -= settings.get("frequency_penalty", 0.0) * count + settings.get("presence_penalty", 0.0) * (count > 0)
        x[v] += settings.get("logit_bias", {}).get(v, 0.0)
    forbidden = set()
    if allowed is not None:
        forbidden |= set(range(len(x))) - set(allowed)
    if settings.get("allowed_token_ids"):
        forbidden |= set(range(len(x))) - set(settings["allowed_token_ids"])
    if len(written) < settings.get("min_tokens", 0):
        forbidden |= {EOS, *settings.get("stop_token_ids", ())}
    for word in settings.get("bad_words", ()):
        if tuple(written[len(written) - len(word) + 1 :]) == tuple(word[:-1]):
            forbidden.add(word[-1])
    x[list(forbidden)] = -np.inf
    return x


def probabilities(x: np.ndarray, settings: dict) -> np.ndarray:
    """Temperature, min-p, top-k, top-p, in this order."""
    temperature = settings.get("temperature", 1.0)
    if temperature < 1e-5:
        return np.eye(len(x))[int(np.argmax(x))]
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    order = [v for v in sorted(range(len(x)), key=lambda v: (-x[v], v)) if p[v] > 0]
    order = [v for v in order if p[v] >= settings.get("min_p", 0.0) * p.max()]
    everything = p[order].sum()
    top_k = settings.get("top_k") or len(x)
    kept = order[:top_k]
    total = everything if settings.get("top_k_top_p") == "joint" else p[kept].sum()
    before = np.cumsum([0, *p[kept][:-1]])
    kept = [v for v, mass in zip(kept, before, strict=True) if mass < settings.get("top_p", 1.0) * total]
    result = np.zeros(len(x))
    result[kept] = p[kept] / p[kept].sum()
    return result


def found(sampler: Sampler, logits, row: SamplingRow) -> np.ndarray:
    """What the sampler says it draws from."""
    (distribution,) = sampler.distributions(torch.tensor(np.array(logits, np.float32))[None], [row])
    result = np.zeros(len(logits))
    result[distribution.ids] = distribution.probabilities
    return result


def drawn(sampler: Sampler, logits, count: int, **settings) -> Counter:
    rows = [row_of(sampler, seed, **settings) for seed in range(count)]
    tokens = sampler.sample(torch.tensor(np.array(logits, np.float32))[None], rows, [0] * count)
    return Counter(token.token_id for token in tokens)


def deviations(counts: Counter, shares: np.ndarray) -> float:
    """Chi-square in standard deviations of what is expected (Wilson and Hilferty); nothing impossible may occur."""
    total = sum(counts.values())
    assert not [v for v in counts if shares[v] == 0], "a token was drawn that cannot be"
    cells = [(counts[v], share * total) for v, share in enumerate(shares) if share * total >= 5]
    rest = total - sum(expected for _, expected in cells)
    cells += [(total - sum(count for count, _ in cells), rest)] if rest > 5 else []
    statistic, freedom = sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1
    if freedom == 0:
        return 0.0
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


SETTINGS = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "almost greedy": {"temperature": 9e-6},
    "top-k": {"top_k": 4},
    "top-k of one": {"top_k": 1},
    "top-p": {"top_p": 0.8},
    "top-p of one": {"top_p": 0.01},
    "min-p": {"min_p": 0.1},
    "min-p of one": {"min_p": 1.0},
    "sequential": {"top_k": 5, "top_p": 0.85},
    "joint": {"top_k": 5, "top_p": 0.85, "top_k_top_p": "joint"},
    "all filters": {"temperature": 1.7, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    "all filters, joint": {"temperature": 1.7, "top_k": 7, "top_p": 0.9, "min_p": 0.05, "top_k_top_p": "joint"},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below one": {"repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": -1.5},
    "all penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.4, "top_k": 6},
    "bias": {"logit_bias": {0: 3.0, 8: -2.0}},
    "bias and penalties": {"logit_bias": {7: 2.5, 8: -100, 0: 1.0}, "repetition_penalty": 2.0, "frequency_penalty": 0.3},
    "allowed": {"allowed_token_ids": [2, 5, 9, 11]},
    "allowed and bias": {"allowed_token_ids": [2, 5], "logit_bias": {9: 100.0, 2: -1.0}},
    "bad words": {"bad_words": [(4,), (8, 9, 10), (9, 0), (8, 8, 8, 8)]},
    "min tokens": {"min_tokens": 5, "stop_token_ids": [6], "logit_bias": {EOS: 9.0}},
    "min tokens reached": {"min_tokens": 4, "stop_token_ids": [6], "logit_bias": {EOS: 9.0}},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_probabilities_are_exact(sampler: Sampler, settings: dict) -> None:
    want = probabilities(adjusted(LOGITS, settings), settings)
    got = found(sampler, LOGITS, row_of(sampler, **settings))
    assert np.array_equal(got > 0, want > 0)
    assert np.allclose(got, want, rtol=3e-6, atol=0)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_draws_are_distributed_so(sampler: Sampler, settings: dict) -> None:
    want = probabilities(adjusted(LOGITS, settings), settings)
    assert deviations(drawn(sampler, LOGITS, 4000, **settings), want) < 4.5


def test_the_test_of_distributions_can_fail(sampler: Sampler) -> None:
    counts = drawn(sampler, LOGITS, 4000)
    assert deviations(counts, probabilities(LOGITS / 1.15, {})) > 6


@pytest.mark.parametrize("seed", range(40))
def test_random_settings(sampler: Sampler, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(size=VOCAB) * 3, int(rng.integers(0, 3))).astype(np.float32)  # with ties
    settings = {
        "temperature": float(rng.choice([0.5, 1.0, 2.0])),
        "top_k": int(rng.integers(0, VOCAB + 3)),
        "top_p": float(rng.choice([0.37, 0.73, 0.93, 1.0])),
        "min_p": float(rng.choice([0.0, 0.03, 0.3])),
        "top_k_top_p": str(rng.choice(["joint", "sequential"])),
        "repetition_penalty": float(rng.choice([1.0, 1.3])),
        "presence_penalty": float(rng.choice([0.0, 0.25])),
    }
    drafted = rng.integers(0, VOCAB, int(rng.integers(0, 4))).tolist()
    want = probabilities(adjusted(logits, settings, drafted=drafted), settings)
    got = found(sampler, logits, row_of(sampler, drafted=drafted, **settings))
    assert np.array_equal(got > 0, want > 0)
    assert np.allclose(got, want, rtol=3e-6, atol=0)


@pytest.mark.parametrize("batch", [1, 8])
def test_ties_keep_the_lowest_ids(sampler: Sampler, batch: int) -> None:
    """Case 4: l = [3, 2, 2, 2, 1] with k = 2 keeps ids 0 and 1 in any batch."""
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0] + [-9.0] * (VOCAB - 5)] * batch)
    counts: Counter = Counter()
    for seed in range(300):
        rows = [row_of(sampler, seed * batch + i, top_k=2) for i in range(batch)]
        counts.update(token.token_id for token in sampler.sample(logits, rows))
    assert set(counts) == {0, 1}
    for distribution in sampler.distributions(logits, [row_of(sampler, top_k=2)] * batch):
        assert distribution.ids.tolist() == [0, 1]
    for distribution in sampler.distributions(logits, [row_of(sampler, top_p=0.6)] * batch):
        assert distribution.ids.tolist() == [0, 1]


def test_greedy_takes_the_lowest_of_equals(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 9]] = 2.0
    (token,) = sampler.sample(logits, [row_of(sampler, temperature=0.0)])
    assert token.token_id == 4
    (token,) = sampler.sample(torch.zeros(1, VOCAB), [row_of(sampler, temperature=0.0)])
    assert token.token_id == 0


def test_sequential_and_joint_differ(sampler: Sampler) -> None:
    """p = .5, .2, .2, .1 with k = 2: top-p .7 of the two is one token, of all it is both."""
    logits = np.full(VOCAB, -60.0)
    logits[:4] = np.log([0.5, 0.2, 0.2, 0.1])
    assert np.flatnonzero(found(sampler, logits, row_of(sampler, top_k=2, top_p=0.69))).tolist() == [0]
    joint = row_of(sampler, top_k=2, top_p=0.69, top_k_top_p="joint")
    assert np.flatnonzero(found(sampler, logits, joint)).tolist() == [0, 1]


def test_penalty_comes_before_bias(sampler: Sampler) -> None:
    """A logit of 4 with penalty 2 and bias -5 becomes 4 / 2 - 5 = -3; the other way round it would be (4 - 5) * 2 = -2."""
    logits = np.zeros(VOCAB)
    logits[7] = 4.0
    got = found(sampler, logits, row_of(sampler, repetition_penalty=2.0, logit_bias={7: -5.0}))
    assert math.log(got[7] / got[0]) == pytest.approx(4 / 2 - 5)


def test_no_bias_lifts_a_masked_token(sampler: Sampler) -> None:
    mask = np.array([0b000000110000], np.int32)
    counts = drawn(sampler, LOGITS, 300, logit_bias={0: 100.0, 11: 100.0}, mask=mask)
    assert set(counts) == {4, 5}


def test_grammar_masks_are_as_wide_as_the_logits(sampler: Sampler) -> None:
    """Case 19: a mask of 32 tokens over 40 logits, the highest of which lies past it."""
    wide = Sampler(sampler._ops, TokenRoles(40))
    logits = torch.zeros(1, 40)
    logits[0, 38] = 50.0
    mask = np.array([-1], np.int32)
    rows = [SamplingRow(SamplingParams(), seed, 0, None, (), mask) for seed in range(500)]
    drawn_ids = {token.token_id for token in wide.sample(logits, rows, [0] * 500)}
    assert max(drawn_ids) < 32
    assert len(drawn_ids) == 32


def test_grammar_beats_min_tokens(sampler: Sampler) -> None:
    """Case 16: a grammar that allows EOS alone, before min_tokens."""
    only_eos = np.array([1 << EOS], np.int32)
    (token,) = sampler.sample(torch.zeros(1, VOCAB), [row_of(sampler, min_tokens=16, mask=only_eos)])
    assert token.token_id == EOS
    eos_or_more = np.array([1 << EOS | 1 << 7], np.int32)
    assert set(drawn(sampler, np.zeros(VOCAB), 50, min_tokens=16, mask=eos_or_more)) == {7}


def test_nothing_left_is_an_error_of_that_row(sampler: Sampler) -> None:
    logits = torch.zeros(2, VOCAB)
    rows = [
        row_of(sampler, allowed_token_ids=[5], mask=np.array([1 << 6], np.int32)),
        row_of(sampler, allowed_token_ids=[5]),
    ]
    failed, fine = sampler.sample(logits, rows)
    assert failed == "no token is left to draw: the grammar, allowed_token_ids forbid all"
    assert fine.token_id == 5
    assert sampler.distributions(logits, rows)[0] == failed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"logit_bias": {1: 1.0}}])
def test_logits_that_are_no_numbers_fail_their_row_alone(sampler: Sampler, bad: float, settings: dict) -> None:
    logits = torch.tensor(np.stack([LOGITS] * 3))
    logits[1, 4] = bad
    first, failed, last = sampler.sample(logits, [row_of(sampler, 7, **settings)] * 3)
    assert failed == NOT_FINITE
    assert first == last
    (alone,) = sampler.sample(logits[:1], [row_of(sampler, 7, **settings)])
    assert alone == first


@pytest.mark.parametrize(("drafted", "expected"), [((), 0.0), ((4,), 0.5), ((4, 4, 4, 4), 2.0), ((9, 4, 9), 0.5)])
def test_penalties_count_drafts(sampler: Sampler, drafted: tuple, expected: float) -> None:
    """Case 22: behind four accepted tokens the frequency penalty of .5 is 2.0; tokens are counted, and not steps."""
    plain = found(sampler, np.zeros(VOCAB), row_of(sampler))
    got = found(sampler, np.zeros(VOCAB), row_of(sampler, drafted=drafted, frequency_penalty=0.5))
    assert math.log(got[0] / got[4]) - math.log(plain[0] / plain[4]) == pytest.approx(expected, abs=1e-6)


def test_drafted_and_appended_tokens_count_the_same() -> None:
    """A row behind drafts has the logits of a sequence in which these were generated."""
    rng = np.random.default_rng(0)
    settings = SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, min_tokens=6, bad_words=[(8, 9), (3,)],
        logit_bias={8: 1.0, 11: -2.0}, thinking_token_budget=2,
    )  # fmt: skip
    for _ in range(60):
        drafted = rng.integers(0, VOCAB, int(rng.integers(0, 6))).tolist()
        ahead = LogitRules(settings, ROLES, [*PROMPT, *OUTPUT], len(PROMPT)).change(drafted)
        behind = LogitRules(settings, ROLES, [*PROMPT, *OUTPUT], len(PROMPT))
        behind.append(drafted)
        told = behind.change()
        for change in (ahead, told):
            assert not isinstance(change, str)
        order, other = np.argsort(ahead.ids), np.argsort(told.ids)
        for name in ("ids", "divisor", "minus", "plus"):
            assert np.array_equal(getattr(ahead, name)[order], getattr(told, name)[other]), name
        assert np.array_equal(ahead.mask, told.mask)


@pytest.mark.parametrize(
    ("output", "forced"),
    [
        ([], False),
        ([THINK], False),
        ([THINK, 5, 6], False),
        ([THINK, 5, 6, 7], True),
        ([THINK, 5, THINK_END, 6, 7, 8], False),
    ],
)
def test_thinking_budget(sampler: Sampler, output: list[int], forced: bool) -> None:
    want = {THINK_END} if forced else set(range(VOCAB))
    row = row_of(sampler, output=output, thinking_token_budget=3)
    assert set(np.flatnonzero(found(sampler, np.zeros(VOCAB), row)).tolist()) == want
    ahead = row_of(sampler, output=output[:1], drafted=output[1:], thinking_token_budget=3)
    assert set(np.flatnonzero(found(sampler, np.zeros(VOCAB), ahead)).tolist()) == want


def test_noise_is_keyed_by_id_whatever_others_filter(sampler: Sampler) -> None:
    """Case 5: an unfiltered row, seed 7, 64 positions, alone and beside a row with top_k = 1."""
    logits = torch.tensor(np.stack([LOGITS, LOGITS]))
    for position in range(64):
        own = row_of(sampler, 7, position)
        (alone,) = sampler.sample(logits[:1], [own])
        beside, _ = sampler.sample(logits, [own, row_of(sampler, 9, position, top_k=1)])
        assert alone == beside


def test_seeds_decide(sampler: Sampler) -> None:
    """Case 8: seeds 1, 1, 2 over 32 positions."""
    logits = torch.tensor(LOGITS)[None]
    runs = [[sampler.sample(logits, [row_of(sampler, seed, t)])[0].token_id for t in range(32)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_extreme_noise_draws_nothing_impossible(sampler: Sampler, monkeypatch) -> None:
    """Case 6: the largest hash at a masked token and at one of -50: neither wins against 0."""
    from abyssal.core.noise import gumbel_of

    largest = gumbel_of(np.array([0xFFFFFFFF], np.uint64))[0]
    smallest = gumbel_of(np.array([0], np.uint64))[0]
    assert math.isfinite(largest)
    assert -50 + largest < 0 + smallest
    counts = drawn(sampler, [0.0, -50.0, *[-60.0] * (VOCAB - 2)], 2000, mask=np.array([0b11], np.int32))
    assert set(counts) == {0}


def test_rows_know_nothing_of_each_other(sampler: Sampler) -> None:
    rng = np.random.default_rng(5)
    logits = torch.tensor(rng.normal(size=(30, VOCAB)).astype(np.float32))
    names = list(SETTINGS)
    rows = [row_of(sampler, i, i, logprobs=i % 4, **SETTINGS[names[i % len(names)]]) for i in range(30)]
    together = sampler.sample(logits, rows)
    order = rng.permutation(30)
    shuffled = sampler.sample(logits, [rows[i] for i in order], order.tolist())
    assert [shuffled[list(order).index(i)] for i in range(30)] == together
    for i in range(30):
        assert sampler.sample(logits[i : i + 1], [rows[i]]) == [together[i]]


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


def test_raw_log_probabilities(sampler: Sampler) -> None:
    settings = {"temperature": 0.5, "top_k": 2, "logit_bias": {8: 5.0}, "frequency_penalty": 1.0}
    want = log_softmax(LOGITS.astype(np.float64))
    order = sorted(range(VOCAB), key=lambda v: (-LOGITS[v], v))
    for seed in range(20):
        (token,) = sampler.sample(torch.tensor(LOGITS)[None], [row_of(sampler, seed, logprobs=4, **settings)])
        entry = token.logprobs
        assert entry.token_id == token.token_id
        assert entry.logprob == pytest.approx(want[token.token_id], abs=1e-5)
        assert entry.rank == 1 + order.index(token.token_id)
        assert [v for v, _ in entry.top] == order[:4]
        assert [value for _, value in entry.top] == pytest.approx([want[v] for v in order[:4]], abs=1e-5)


@pytest.mark.parametrize("name", ["top-k", "all filters", "all penalties", "bias and penalties", "allowed"])
def test_processed_log_probabilities(sampler: Sampler, name: str) -> None:
    settings = SETTINGS[name]
    shares = probabilities(adjusted(LOGITS, settings), settings)
    order = [v for v in sorted(range(VOCAB), key=lambda v: (-shares[v], v)) if shares[v] > 0]
    for seed in range(20):
        row = row_of(sampler, seed, logprobs=6, logprobs_mode="processed", **settings)
        (token,) = sampler.sample(torch.tensor(LOGITS)[None], [row])
        entry = token.logprobs
        assert entry.logprob == pytest.approx(math.log(shares[token.token_id]), abs=1e-5)
        assert entry.rank == 1 + order.index(token.token_id)
        assert [v for v, _ in entry.top] == order[:6]
        assert [value for _, value in entry.top] == pytest.approx([math.log(shares[v]) for v in order[:6]], abs=1e-5)


def test_greedy_rows_are_scored_at_temperature_one(sampler: Sampler) -> None:
    row = row_of(sampler, temperature=0.0, logprobs=1, logprobs_mode="processed", logit_bias={8: 1.0})
    (token,) = sampler.sample(torch.tensor(LOGITS)[None], [row])
    want = log_softmax(adjusted(LOGITS, {"logit_bias": {8: 1.0}}))
    assert token.logprobs.logprob == pytest.approx(want[token.token_id], abs=1e-5)
    assert token.logprobs.rank == 1


def test_ranks_of_equals_follow_their_ids(sampler: Sampler) -> None:
    (entry,) = sampler.logprobs(torch.zeros(1, VOCAB), [0], [5], [3])
    assert (entry.rank, [v for v, _ in entry.top]) == (6, [0, 1, 2])
    assert entry.logprob == pytest.approx(-math.log(VOCAB), abs=1e-6)
