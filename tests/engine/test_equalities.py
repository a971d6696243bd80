"""The same logits however a sequence is cut, batched, preempted or placed."""

from __future__ import annotations

import random

import pytest
import torch

from abyssal.config.engine import EngineConfig
from abyssal.core.request import RowSchedule
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.engine import Engine

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a - b).norm(dim=1) <= 1e-5 * b.norm(dim=1)).all())


def random_ids(count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(11, 400) for _ in range(count)]


@pytest.fixture(scope="module", params=["micro", "deep"])
def engine(request, checkpoint_of) -> Engine:
    config = EngineConfig(numerics="exact", num_blocks=64, max_num_seqs=16, max_num_batched_tokens=256, num_threads=1)
    return Engine(checkpoint_of(request.param), config)


@pytest.fixture(scope="module")
def whole(engine) -> torch.Tensor:
    return engine.score(random_ids(270), chunk=None)


@pytest.mark.parametrize("chunk", [1, 7, 127, 128, 129])
def test_chunks(engine, whole, chunk):
    length = 270 if chunk > 1 else 140
    assert close(engine.score(random_ids(270)[:length], chunk=chunk), whole[:length])


@pytest.mark.parametrize("decode_from", [1, 60, 131])
def test_single_decode_steps(engine, whole, decode_from):
    length = min(decode_from + 80, 270)
    assert close(engine.score(random_ids(270)[:length], decode_from=decode_from), whole[:length])


def score_together(engine: Engine, prompts: list[list[int]], **schedule) -> list[torch.Tensor]:
    """Logits of several prompts that run side by side."""
    order = [engine.add(p, ONE_TOKEN, wants_prompt_logits=True, row_schedule=RowSchedule(**schedule)) for p in prompts]
    logits = {}
    while engine.has_unfinished:
        for output in engine.step():
            logits[output.request_id] = output.prompt_logits
        engine.check_integrity()
    return [logits[request_id] for request_id in order]


@pytest.mark.parametrize("others", [1, 2, 5, 9])
def test_batched_with_others(engine, whole, others):
    neighbours = [random_ids(3 + 37 * i, seed=i + 1) for i in range(others)]
    together = score_together(engine, [*neighbours, random_ids(270)], chunk=41)
    assert close(together[-1], whole)


def test_neighbours_are_right_too(engine):
    prompts = [random_ids(3 + 29 * i, seed=i + 1) for i in range(6)]
    for prompt, logits in zip(prompts, score_together(engine, prompts, chunk=33), strict=True):
        assert close(logits, engine.score(prompt))


@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_preemption_and_shuffled_blocks(checkpoint_of, preset):
    """A pool too small for all: requests are preempted and computed again, over blocks in random order."""
    folder = checkpoint_of(preset)
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [random_ids(90 + 7 * i, seed=20 + i) for i in range(4)]
    common = {"numerics": "exact", "num_threads": 1, "max_num_batched_tokens": 96}

    def run(num_blocks: int, shuffle_seed: int | None) -> tuple[list[tuple[list[int], list[float]]], int]:
        engine = Engine(folder, EngineConfig(num_blocks=num_blocks, **common), shuffle_seed=shuffle_seed)
        order = [engine.add(p, params) for p in prompts]
        done = {}
        while engine.has_unfinished:
            for output in engine.step():
                done[output.request_id] = output.outputs[0]
            engine.check_integrity()
        return [
            (done[i].token_ids, [entry.logprob for entry in done[i].logprobs]) for i in order
        ], engine.stats.num_preemptions

    roomy, preemptions = run(64, None)
    assert preemptions == 0
    tight, preemptions = run(5, 3)
    assert preemptions > 0
    for (ids, logprobs), (other_ids, other_logprobs) in zip(roomy, tight, strict=True):
        assert ids == other_ids
        assert logprobs == pytest.approx(other_logprobs, abs=1e-4)


def test_unwritten_memory_is_never_read(checkpoint_of):
    """All caches start as NaN: every row that is read was written by the same request."""
    engine = Engine(checkpoint_of("micro"), EngineConfig(numerics="exact", num_blocks=16, max_num_seqs=4, num_threads=1))
    wanted = engine.score(random_ids(60))
    engine.fill_caches(float("nan"))
    assert torch.equal(engine.score(random_ids(60), chunk=7), engine.score(random_ids(60), chunk=7))
    assert close(engine.score(random_ids(60), chunk=7), wanted)


def test_one_token_prompt(engine, whole):
    assert close(engine.score(random_ids(270)[:1]), whole[:1])


@pytest.mark.slow
def test_prompt_of_fifty_windows(checkpoint_of):
    engine = Engine(checkpoint_of("micro"), EngineConfig(numerics="exact", num_threads=1, num_blocks=16))
    ids = random_ids(engine.model_config.text.sliding_window * 50 + 3)
    assert close(engine.score(ids, chunk=100), engine.score(ids, chunk=512))


def test_empty_batch(engine):
    assert not engine.has_unfinished
    assert engine.step() == []


@pytest.mark.slow
def test_64_concurrent_requests(checkpoint_of):
    engine = Engine(checkpoint_of("micro"), EngineConfig(num_threads=1, num_blocks=128, max_num_seqs=64))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [random_ids(2 + i, seed=i) for i in range(64)]
    order = [engine.add(p, params) for p in prompts]
    done = {}
    most = 0
    while engine.has_unfinished:
        for output in engine.step():
            done[output.request_id] = output
        engine.check_integrity()
        most = max(most, engine.stats.num_requests_running)
    assert most == 64
    assert all(len(done[i].outputs[0].token_ids) == 8 for i in order)
    alone = Engine(checkpoint_of("micro"), EngineConfig(num_threads=1, num_blocks=16, max_num_seqs=1))
    for index in (0, 17, 63):
        alone.add(prompts[index], params)
        output = None
        while alone.has_unfinished:
            output = (alone.step() or [output])[-1]
        assert output.outputs[0].token_ids == done[order[index]].outputs[0].token_ids
