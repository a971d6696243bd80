"""A model on the card against the same model on the processor, and against golden tensors."""

from __future__ import annotations

import pytest
import torch

from abyssal.config.engine import EngineConfig
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.engine import Engine

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")]


@pytest.fixture(scope="module")
def engine_of(checkpoint_of):
    engines: dict[tuple[str, ...], Engine] = {}

    def make(preset: str, numerics: str, device: str, weights: str = "decoded", **settings) -> Engine:
        key = (preset, numerics, device, weights, *map(str, settings.items()))
        if key not in engines:
            settings = {"num_threads": 1, "backend": "torch", "invariant": False} | settings
            config = EngineConfig(
                numerics=numerics, device=device, weights=weights, num_blocks=16, max_num_seqs=4, **settings
            )
            engines[key] = Engine(checkpoint_of(preset), config)
        return engines[key]

    return make


def generate(engine: Engine, prompt: list[int], count: int) -> list[int]:
    engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
    outputs = []
    while engine.has_unfinished:
        outputs = engine.step()
    return outputs[0].outputs[0].token_ids


@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_exact_logits(engine_of, golden_of, preset):
    golden = golden_of(preset)
    got = engine_of(preset, "exact", "cuda").score(golden["input_ids"].tolist())
    want = golden["exact.logits"]
    error = (got - want).norm(dim=1) / want.norm(dim=1)
    print(f"{preset} exact: worst {float(error.max()):.3g}")
    assert error.max() < 1e-3


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_exact_greedy_continuation(engine_of, golden_of, preset, invariant):
    golden = golden_of(preset)
    prompt = golden["input_ids"][: int(golden["greedy_prompt_len"])].tolist()
    wanted = golden["exact.greedy_ids"].tolist()
    assert generate(engine_of(preset, "exact", "cuda", invariant=invariant), prompt, len(wanted)) == wanted


@pytest.mark.parametrize("weights", ["decoded", "packed"])
@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_released_top_tokens(engine_of, golden_of, preset, weights):
    ids = golden_of(preset)["input_ids"].tolist()
    got, want = (engine_of(preset, "released", d, weights).score(ids) for d in ("cuda", "cpu"))
    same = (got.argmax(1) == want.argmax(1)).float().mean()
    error = (got - want).norm(dim=1) / want.norm(dim=1)
    print(f"{preset} released {weights}: same top token {float(same):.4f}, median error {float(error.median()):.3g}")
    assert same >= 0.99


@pytest.mark.parametrize("weights", ["decoded", "packed"])
def test_drafts_change_nothing(engine_of, golden_of, weights):
    golden = golden_of("micro")
    prompt = golden["input_ids"][:20].tolist()
    plain = generate(engine_of("micro", "exact", "cuda", weights), prompt, 16)
    assert generate(engine_of("micro", "exact", "cuda", weights, speculation=3), prompt, 16) == plain
