"""Output does not depend on what runs beside it: ids and float32 log-probabilities are equal, bit for bit.

One request is computed alone, in batches of many sizes, in chunks, with drafts, preempted, and with more threads. The
negative control is torch without fixed tiles, which fails the same comparison.
"""

from __future__ import annotations

import random

import pytest
import torch

from abyssal.backends.cpu.table import cpu_table, torch_table
from abyssal.config.engine import EngineConfig
from abyssal.core.errors import ConfigError, UnsupportedOnBackend
from abyssal.core.request import RowSchedule
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine import launch
from abyssal.engine.engine import Engine
from abyssal.ops.invariance import require_invariance, varying_ops

SIZES = (1, 2, 3, 5, 7, 8, 9, 31, 33, 64)
LENGTH = 135  # more than a block, and more than the window
NUM_TOKENS = 8


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(11, 400) for _ in range(length)]


def params_of(seed: int, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, logprobs=3, prompt_logprobs=1, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip


def engine_of(folder, backend: str, **changes) -> Engine:
    settings = {"num_threads": 1, "max_num_seqs": 64, "num_blocks": 140, "max_num_batched_tokens": 512} | changes
    return Engine(folder, EngineConfig(backend=backend, **settings), shuffle_seed=5)


def watched(engine: Engine, temperature: float, beside: int = 0, schedule: RowSchedule = RowSchedule()) -> tuple:  # noqa: B008
    """What becomes of one request among others that start before and behind it."""
    others = [(prompt_of(100 + i, 2 + 5 * i % 37), params_of(i, i % 2)) for i in range(beside)]
    for prompt, params in others[::2]:
        engine.add(prompt, params)
    own = engine.add(prompt_of(0, LENGTH), params_of(7, temperature), row_schedule=schedule)
    for prompt, params in others[1::2]:
        engine.add(prompt, params)
    found = None
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished and output.request_id == own:
                completion = output.outputs[0]
                found = (completion.token_ids, completion.logprobs, output.prompt_logprobs)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(request) -> str:
    from abyssal.backends.cpu import native

    if request.param == "native" and native.load() is None:
        pytest.skip("no native library was built")
    return request.param


@pytest.fixture(scope="module")
def engine(checkpoint_of, backend) -> Engine:
    return engine_of(checkpoint_of("micro"), backend)


@pytest.fixture(scope="module")
def alone(engine) -> dict[float, tuple]:
    """The request with nothing beside it, by temperature."""
    return {temperature: watched(engine, temperature) for temperature in (0.0, 1.0)}


def test_there_is_something_to_compare(alone) -> None:
    for token_ids, logprobs, prompt_logprobs in alone.values():
        assert len(token_ids) == len(logprobs) == NUM_TOKENS
        assert len({entry.logprob for entry in logprobs}) == NUM_TOKENS
        assert len(prompt_logprobs) == LENGTH
    assert alone[0.0][0] != alone[1.0][0]
    assert alone[0.0][2] == alone[1.0][2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [size if size in (2, 9) else pytest.param(size, marks=pytest.mark.slow) for size in SIZES])
def test_batch_sizes(engine, alone, size: int, temperature: float) -> None:
    assert watched(engine, temperature, size - 1) == alone[temperature]


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 3, 16, 127, 128, 129])
def test_chunks(engine, alone, chunk: int) -> None:
    for beside in (0, 3):
        assert watched(engine, 1.0, beside, RowSchedule(chunk=chunk)) == alone[1.0]


@pytest.mark.parametrize("rows", [5, 40, 200])
def test_budgets(checkpoint_of, backend, alone, rows: int) -> None:
    engine = engine_of(checkpoint_of("micro"), backend, max_num_batched_tokens=rows)
    assert watched(engine, 1.0, 6) == alone[1.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculation", [1, 3])
def test_drafts(checkpoint_of, backend, alone, speculation: int, temperature: float) -> None:
    engine = engine_of(checkpoint_of("micro"), backend, speculation=speculation)
    for beside in (0, 8):
        assert watched(engine, temperature, beside) == alone[temperature]
    assert engine.stats.speculation.places[0].verified > 0


@pytest.mark.parametrize("speculation", ["off", 3])
def test_preemption(checkpoint_of, backend, speculation) -> None:
    """Several long requests over a few blocks: the last to arrive is computed anew, prompt and output so far."""
    prompts = [prompt_of(i, 122 + i) for i in range(3)]
    results = []
    for num_blocks in (4, 40):
        engine = engine_of(checkpoint_of("micro"), backend, num_blocks=num_blocks, speculation=speculation)
        ids = [engine.add(prompt, params_of(i, i % 2)) for i, prompt in enumerate(prompts)]
        done = {}
        while engine.has_unfinished:
            done |= {output.request_id: output for output in engine.step() if output.finished}
        results.append([(done[i].outputs[0].token_ids, done[i].outputs[0].logprobs, done[i].prompt_logprobs) for i in ids])
        assert (engine.stats.num_preemptions > 0) == (num_blocks == 4)
    assert results[0] == results[1]


def test_threads(checkpoint_of, backend, alone) -> None:
    engine = engine_of(checkpoint_of("micro"), backend, num_threads=2)
    for beside in (0, 8):
        assert watched(engine, 1.0, beside) == alone[1.0]
    assert engine.config.num_threads == (2 if backend == "native" else 1)


def test_negative_control(checkpoint_of) -> None:
    """torch's own kernels choose by the number of rows: the comparison above has to notice."""
    engine = engine_of(checkpoint_of("micro"), "torch", invariant=False)
    expected = watched(engine, 1.0)
    assert watched(engine, 1.0) == expected
    assert any(watched(engine, 1.0, size - 1) != expected for size in SIZES[1:7])


@pytest.mark.parametrize("name", ["invariant", "overlap"])
def test_settings_that_are_neither_true_nor_false(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='off': must be True or False"):
        EngineConfig(**{name: "off"})


def test_the_start_up_test_passes(backend) -> None:
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert varying_ops(cpu_table(backend, num_threads)) == []


def test_the_start_up_test_refuses(checkpoint_of, monkeypatch) -> None:
    assert "linear" in varying_ops(torch_table())
    with pytest.raises(UnsupportedOnBackend, match=r"invariant=True: .* linear.*--no-invariant"):
        require_invariance(torch_table(), "torch")
    monkeypatch.setattr(launch, "cpu_table", lambda *_, **__: torch_table())
    with pytest.raises(UnsupportedOnBackend, match="invariant=True"):
        engine_of(checkpoint_of("micro"), "torch")
    engine_of(checkpoint_of("micro"), "torch", invariant=False).close()
