"""Random weights without a checkpoint: the shape of the real thing, the same at every call, finite, and small in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from abyssal.config.engine import EngineConfig
from abyssal.config.model import ModelConfig
from abyssal.config.released import released_config
from abyssal.loading.dummy import DummyCheckpoint
from abyssal.loading.open import open_weights
from abyssal.loading.safetensors import Checkpoint
from abyssal.loading.weights import StoredWeights
from abyssal.quant.convert import decode


@pytest.fixture
def micro(checkpoint_of: Callable[[str], Path]) -> ModelConfig:
    return ModelConfig.load(checkpoint_of("micro"))


def test_same_interface_as_a_checkpoint(checkpoint_of: Callable[[str], Path], micro: ModelConfig) -> None:
    real, dummy = Checkpoint.open(checkpoint_of("micro")), DummyCheckpoint(micro)
    assert set(dummy.names()) == set(real.names())
    for name in real.names():
        assert name in dummy
        made, stored = dummy.tensor(name), real.tensor(name)
        assert made.shape == stored.shape
        assert made.dtype == stored.dtype or "engram" in name


def test_function_of_name_and_seed_alone(micro: ModelConfig) -> None:
    names = ["layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.scale", "norm.weight", "layers.3.ffn.experts.1.w2.weight"]
    first = {name: DummyCheckpoint(micro).tensor(name) for name in names}
    backwards = DummyCheckpoint(micro)
    for name in reversed(names):
        assert torch.equal(backwards.tensor(name), first[name])
    assert not torch.equal(DummyCheckpoint(micro, seed=1).tensor("norm.weight"), first["norm.weight"])
    assert not torch.equal(backwards.tensor("layers.1.attn.wq_a.weight"), first["layers.0.attn.wq_a.weight"])


def test_values_are_finite_and_of_sane_size(micro: ModelConfig) -> None:
    weights = StoredWeights(DummyCheckpoint(micro))
    for name, std in (("layers.0.attn.wq_b", 0.15), ("layers.0.ffn.experts.0.w1", 0.08), ("embed", 0.5)):
        values = decode(weights.matrix(name))
        assert values.isfinite().all()
        assert values.std().item() == pytest.approx(std, rel=0.1)


def test_rows_of_a_table_far_larger_than_memory() -> None:
    weights = StoredWeights(DummyCheckpoint(released_config()))
    table = weights.engram_table("layers.14.engram.embed")
    rows = torch.tensor([384016681, 0, 12345678, 384016681])
    values = table.gather(rows)
    assert values.shape == (4, 256)
    assert values.isfinite().all()
    assert torch.equal(values[0], values[3])
    assert not torch.equal(values[0], values[1])
    assert 0.05 < values.std().item() < 0.5


def test_rows_agree_with_the_whole_table(micro: ModelConfig) -> None:
    dummy = DummyCheckpoint(micro)
    for name in ("layers.1.engram.embed.weight", "layers.1.engram.embed.scale"):
        rows = torch.tensor([629, 3, 17])
        assert torch.equal(dummy.rows(name).gather(rows), dummy.tensor(name)[rows])


def test_load_format_dummy_reads_no_file(tmp_path: Path, micro: ModelConfig) -> None:
    weights = open_weights(tmp_path, micro, EngineConfig(load_format="dummy"))
    assert weights.dense("norm.weight").shape == (256,)
