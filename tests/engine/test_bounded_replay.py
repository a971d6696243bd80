"""Bounded replay: the decoder half of the layers runs on a prompt's last rows only, and nobody can tell."""

from __future__ import annotations

import random

import pytest
import torch

from abyssal.config.engine import EngineConfig
from abyssal.config.topology import Topology
from abyssal.core.errors import ConfigError
from abyssal.core.request import RowSchedule
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.engine import Engine

WINDOWS = {"micro": 16, "deep": 32}
WHOLE = RowSchedule()
CONES = {"micro": 3 * 15 + 1, "deep": 20 * 31 + 1}


def random_ids(count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(11, 400) for _ in range(count)]


def make(folder, replay: str | int, **settings) -> Engine:
    common = {"num_blocks": 48, "max_num_seqs": 4, "num_threads": 1, "max_num_batched_tokens": 256}
    return Engine(folder, EngineConfig(bounded_replay=replay, **(common | settings)))


def run(engine: Engine, prompts: list[list[int]], schedule: RowSchedule = WHOLE, **params):
    """Tokens and logprobs of prompts that run side by side."""
    order = [
        engine.add(
            p,
            SamplingParams(max_tokens=24, seed=i, ignore_eos=True, detokenize=False, logprobs=0, **params),
            row_schedule=schedule,
        )
        for i, p in enumerate(prompts)
    ]
    done = {}
    while engine.has_unfinished:
        for output in engine.step():
            done[output.request_id] = output
        engine.check_integrity()
    return [(done[i].outputs[0].token_ids, done[i].outputs[0].logprobs, done[i].prompt_logprobs) for i in order]


@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_cone(checkpoint_of, preset):
    engine = make(checkpoint_of(preset), "off")
    topology = Topology.of(engine.model_config.text)
    assert topology.replay_rows(WINDOWS[preset]) == CONES[preset]


@pytest.mark.parametrize("numerics", ["released", "exact"])
@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_exact_replay_changes_nothing(checkpoint_of, preset, numerics):
    cone = CONES[preset]
    lengths = [1, cone - 1, cone, cone + 1, cone + WINDOWS[preset], 2 * cone + 77]
    prompts = [random_ids(n, seed=n) for n in lengths]
    off, exact = (make(checkpoint_of(preset), replay, numerics=numerics) for replay in ("off", "exact"))
    assert run(exact, prompts) == run(off, prompts)
    assert exact.stats.num_decoder_rows < off.stats.num_decoder_rows
    saved = sum(n - min(n, cone) for n in lengths)
    assert off.stats.num_decoder_rows - exact.stats.num_decoder_rows == saved


@pytest.mark.parametrize("chunk", [1, 7, 45, 46, 47, 128])
def test_in_chunks(checkpoint_of, chunk):
    prompts = [random_ids(n, seed=n) for n in (30, 46, 150, 171)]
    off, exact = (make(checkpoint_of("micro"), replay) for replay in ("off", "exact"))
    assert run(exact, prompts, RowSchedule(chunk=chunk)) == run(off, prompts)


def test_with_preemption(checkpoint_of):
    prompts = [random_ids(100 + 9 * i, seed=i) for i in range(4)]
    off, exact = (make(checkpoint_of("micro"), replay, num_blocks=5) for replay in ("off", "exact"))
    roomy = run(make(checkpoint_of("micro"), "off"), prompts)
    assert run(exact, prompts) == run(off, prompts) == roomy
    assert exact.stats.num_preemptions > 0


@pytest.mark.parametrize("speculation", [2, 3])
def test_with_drafts(checkpoint_of, speculation):
    """Drafts too see what they would have seen: as many are accepted."""
    prompts = [random_ids(n, seed=n) for n in (90, 151)]
    off, exact = (make(checkpoint_of("micro"), replay, speculation=speculation) for replay in ("off", "exact"))
    assert run(exact, prompts) == run(off, prompts)
    assert exact.stats.num_steps == off.stats.num_steps


@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_state_after_the_prompt(checkpoint_of, preset):
    """All that later steps read is there: entries of every source, and each layer's window."""
    length, window = 2 * CONES[preset] + 5, WINDOWS[preset]
    engines = [make(checkpoint_of(preset), replay, max_num_seqs=1) for replay in ("off", "exact")]
    for engine in engines:
        engine.fill_caches(float("nan"))
        engine.add(random_ids(length), SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
        while engine.has_unfinished:
            engine.step()
    off, exact = (engine._storage for engine in engines)
    topology = Topology.of(engines[0].model_config.text)
    last = torch.arange(length - window + 1, length)
    for plan in topology.layers:
        ours, theirs = exact.window(plan.layer_id)[0], off.window(plan.layer_id)[0]
        assert torch.equal(ours[last % len(ours)], theirs[last % len(theirs)])
    for plan in topology.compressed_sources:
        count = length // plan.ratio
        for rows in ("entries", "index_keys"):
            assert torch.equal(getattr(exact, rows)(plan.layer_id)[:count], getattr(off, rows)(plan.layer_id)[:count])
            assert getattr(exact, rows)(plan.layer_id)[:count].isfinite().all()


class Poisoned:
    """The first layer of the decoder half, whose input is NaN before a position."""

    def __init__(self, layer, first: int) -> None:
        self._layer, self._first = layer, first

    def __call__(self, h, pre, step):
        self._layer.compress(h, pre, step)
        step.entries_written = True
        h = torch.where((step.batch.positions < self._first)[:, None, None], torch.nan, h)
        return self._layer(h, pre, step)


@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_cone_derived_by_poison(checkpoint_of, preset):
    """Rows outside the cone may hold anything. With one row fewer, what later steps read would be damaged."""
    cone, window, length = CONES[preset], WINDOWS[preset], CONES[preset] + 60
    finite = []
    for rows in (cone, cone - 1):
        engine = make(
            checkpoint_of(preset), "off", numerics="exact", max_num_seqs=1, max_num_batched_tokens=1024, overlap=False
        )
        flash = engine._runner._model
        start = Topology.of(engine.model_config.text).decoder_start
        flash._layers[start] = Poisoned(flash._layers[start], length - rows)
        request = engine.add(
            random_ids(length), SamplingParams(temperature=0.0, max_tokens=1, detokenize=False), request_id="poisoned"
        )
        output = next(o for o in engine.step() if o.request_id == request)
        last = torch.arange(length - window + 1, length)
        rings = [engine._storage.window(layer)[0] for layer in range(start, len(flash._layers))]
        finite.append(output.error is None and all(ring[last % len(ring)].isfinite().all() for ring in rings))
    assert finite == [True, False]


def test_prompt_logprobs_switch_it_off(checkpoint_of):
    prompts = [random_ids(200), random_ids(150, seed=1)]
    off, exact = (make(checkpoint_of("micro"), replay) for replay in ("off", "exact"))
    assert run(exact, prompts, prompt_logprobs=2) == run(off, prompts, prompt_logprobs=2)
    assert exact.stats.num_decoder_rows == off.stats.num_decoder_rows


def test_a_number_of_rows_is_an_approximation(checkpoint_of):
    prompt = random_ids(300)
    off, few = (make(checkpoint_of("micro"), replay, numerics="exact") for replay in ("off", "24"))
    few.fill_caches(float("nan"))
    (_, exact_logprobs, _), (_, logprobs, _) = run(off, [prompt])[0], run(few, [prompt])[0]
    assert [p.logprob for p in logprobs] != [p.logprob for p in exact_logprobs]
    assert few.stats.num_decoder_rows == off.stats.num_decoder_rows - (300 - 24)
    many = make(checkpoint_of("micro"), 300, numerics="exact")
    assert run(many, [prompt])[0][1] == exact_logprobs


@pytest.mark.parametrize("value", ["soon", 0, -3, True, 1.5])
def test_other_values_are_refused(value):
    with pytest.raises(ConfigError, match="bounded_replay"):
        EngineConfig(bounded_replay=value)


def test_too_few_rows_are_refused(checkpoint_of):
    with pytest.raises(ConfigError, match="at least 20 rows"):
        make(checkpoint_of("micro"), 19)
