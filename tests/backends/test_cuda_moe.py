"""Routing and experts on the card against the CPU's, and tokens that do not depend on their batch."""

from __future__ import annotations

import pytest
import torch

from abyssal.backends.cpu import moe as reference
from abyssal.backends.cuda import linear as cuda_linear
from abyssal.backends.cuda import moe as cuda
from abyssal.backends.cuda.gemm import SHAPES

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")]

LIMIT = 4e-3
BATCHES = (1, 2, 3, 8, 15, 16, 17, 33, 64, 128)
NUM, HIDDEN, WIDTH, TOP_K = 16, 320, 192, 3


@pytest.fixture(scope="module")
def stored(random_expert):
    return [random_expert("fp4_rows", HIDDEN, WIDTH, 10 * e) for e in range(NUM)], random_expert(
        "fp8_tiles", HIDDEN, WIDTH, 999
    )


@pytest.fixture(scope="module")
def on_card(stored):
    return cuda.prepare_experts(*stored, "packed")


@pytest.fixture(scope="module")
def on_cpu(stored):
    return reference.prepare_experts(*stored, "decoded")


def inputs(tokens: int, seed: int, skewed: bool = False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    weights = torch.rand(tokens, TOP_K, generator=generator)
    chances = torch.ones(NUM) if not skewed else 0.5 ** torch.arange(NUM)
    ids = torch.multinomial(chances.expand(tokens, -1), TOP_K, generator=generator).int()
    return x, ids, weights


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 30, 64, 100, 128, 500, 1500])
@pytest.mark.parametrize("skewed", [False, True])
def test_experts(relative_error, on_card, on_cpu, tokens, rounded, skewed):
    x, ids, weights = inputs(tokens, seed=tokens, skewed=skewed)
    got = cuda.experts(x.cuda(), ids.cuda(), weights.cuda(), on_card, 3.0, rounded)
    want = reference.experts(x.float(), ids, weights, on_cpu, 3.0, rounded)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, want) < LIMIT
    worst = max(relative_error(got[t], want[t]) for t in range(tokens))
    assert worst < 3 * LIMIT


def test_the_cases_use_all_shapes_of_tiles():
    shapes = {cuda.plan_tiles(tokens * TOP_K, tokens, NUM, 6)[0] for tokens in (1, 64, 128, 500)}
    assert shapes == {SHAPES["fp4"][0], SHAPES["fp4"][2]}
    assert cuda.plan_tiles(384, 64, 384, 72)[0] == SHAPES["fp4"][1]


@pytest.mark.parametrize("tokens", [1, 30, 64, 200])
def test_experts_in_tall_tiles(monkeypatch, on_card, tokens):
    x, ids, weights = (t.cuda() for t in inputs(tokens, seed=tokens))
    want = cuda.experts(x, ids, weights, on_card, 3.0, True)
    monkeypatch.setattr(cuda, "_WIDE_TILES", 0)
    monkeypatch.setattr(cuda, "_LARGE_MEAN", 1e9)
    assert cuda.plan_tiles(tokens * TOP_K, tokens, NUM, 6)[0] == SHAPES["fp4"][1]
    assert torch.equal(cuda.experts(x, ids, weights, on_card, 3.0, True), want)


@pytest.mark.parametrize("rounded", [False, True])
def test_tokens_do_not_depend_on_their_batch(on_card, rounded):
    x, ids, weights = (t.cuda() for t in inputs(1500, seed=5, skewed=True))
    whole = cuda.experts(x, ids, weights, on_card, 3.0, rounded)
    for count in BATCHES:
        for start in (0, 1, 77, 1499 - count):
            part = slice(start, start + count)
            assert torch.equal(cuda.experts(x[part], ids[part], weights[part], on_card, 3.0, rounded), whole[part]), (
                count,
                start,
            )


def test_no_tokens(on_card):
    x, ids, weights = (t.cuda() for t in inputs(1, seed=1))
    assert cuda.experts(x[:0], ids[:0], weights[:0], on_card, 3.0, True).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 384, 6), (33, 384, 6), (700, 384, 6), (50, 8, 2), (50, 100, 3)]
)
def test_route(random_matrix, tokens, experts, top_k):
    gate = random_matrix("bf16", experts, 640, seed=experts)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 640, generator=generator).bfloat16()
    bias = torch.randn(experts, generator=generator)
    ids, weights = cuda.route(x.cuda(), cuda_linear.prepare_linear([gate], "packed"), bias.cuda(), top_k, 1.5)
    scores = torch.nn.functional.softplus(x.double() @ gate.data.double().t()).sqrt()
    keys = scores + bias
    picked = keys.gather(1, ids.cpu().long())
    assert (ids.cpu().sort(1).values.diff(dim=1) > 0).all()
    assert (picked.diff(dim=1) < 1e-5).all()  # best first
    rest = keys.scatter(1, ids.cpu().long(), -torch.inf)
    assert (rest.amax(1) < picked[:, -1] + 1e-5).all()
    chosen = scores.gather(1, ids.cpu().long())
    assert torch.allclose(weights.cpu().double(), 1.5 * chosen / chosen.sum(1, keepdim=True), rtol=1e-4)


def test_equal_scores_go_to_the_lowest_ids(random_matrix):
    gate = random_matrix("bf16", 70, 128, seed=1)
    gate.data.zero_()
    bias = torch.zeros(70)
    bias[50] = bias[33] = 1.0
    ids, weights = cuda.route(
        torch.ones(2, 128).bfloat16().cuda(), cuda_linear.prepare_linear([gate], "packed"), bias.cuda(), 4, 1.0
    )
    assert ids.tolist() == [[33, 50, 0, 1]] * 2
    assert torch.allclose(weights.cpu(), torch.full((2, 4), 0.25))


def test_routing_does_not_depend_on_the_batch(random_matrix):
    gate = cuda_linear.prepare_linear([random_matrix("bf16", 384, 1280, seed=3)], "packed")
    x = torch.randn(2000, 1280, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    bias = torch.zeros(384, device="cuda")
    whole = cuda.route(x, gate, bias, 6, 1.5)
    for count in BATCHES:
        part = slice(9, 9 + count)
        ids, weights = cuda.route(x[part], gate, bias, 6, 1.5)
        assert torch.equal(ids, whole[0][part])
        assert torch.equal(weights, whole[1][part])


@pytest.mark.parametrize("pairs", [1, 31, 33, 1000, 1024, 1025, 40000])
def test_sorting_is_stable(pairs):
    generator = torch.Generator().manual_seed(pairs)
    ids = torch.randint(0, 100, (pairs, 1), generator=generator, dtype=torch.int32)
    weights = torch.rand(pairs, 1, generator=generator)
    position, row_weight, tiles = cuda._sort(ids.cuda(), weights.cuda(), 100, 6)
    order = torch.sort(ids.flatten(), stable=True).indices
    assert torch.equal(position.cpu()[order].long(), torch.arange(pairs))
    assert torch.equal(row_weight.cpu(), weights.flatten()[order])
    entries = tiles.entries[: tiles.count.item()].cpu().tolist()
    covered = [(expert, row) for expert, first, count, _ in entries for row in range(first, first + count)]
    assert covered == [(int(ids[order[row], 0]), row) for row in range(pairs)]
    assert max(count for _, _, count, _ in entries) <= tiles.tokens
