"""The generator: same bytes for the same arguments, a tokenizer that fits, dimensions that can be changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from abyssal.config.model import ModelConfig
from abyssal.core.errors import ConfigError
from abyssal.loading.random_checkpoint import SPECIAL_TOKENS, write_random_checkpoint
from abyssal.loading.safetensors import Checkpoint
from abyssal.text.vocabulary import token_map_of


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_arguments_same_bytes(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    first = contents(checkpoint_of("micro"))
    assert contents(write_random_checkpoint(tmp_path / "again", "micro", 7)) == first
    other = contents(write_random_checkpoint(tmp_path / "other", "micro", 8))
    assert {name for name in first if first[name] != other[name]} == {
        name for name in first if name.endswith(".safetensors")
    }


@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_presets_are_whole_checkpoints(checkpoint_of: Callable[[str], Path], preset: str) -> None:
    folder = checkpoint_of(preset)
    config = ModelConfig.load(folder)
    Checkpoint.open(folder).check(config)
    assert token_map_of(folder, config.text).max() + 1 == config.text.engram_compressed_vocab_size
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert [token["content"] for token in tokens] == list(SPECIAL_TOKENS)


def test_dimensions_can_be_changed(tmp_path: Path) -> None:
    folder = write_random_checkpoint(
        tmp_path / "wide",
        "micro",
        1,
        padded_vocab_size=1000,
        hidden_size=512,
        n_routed_experts=12,
        engram_vocab_size=1009,
        vision=None,
    )
    config = ModelConfig.load(folder)
    Checkpoint.open(folder).check(config)
    assert (config.text.vocab_size, config.text.hidden_size, config.vision.num_hidden_layers) == (1000, 512, 0)
    assert config.text.engram_num_embeddings[0] > 6 * 1009
    assert len(token_map_of(folder, config.text)) == 1000


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("huge", {}, "must be one of deep, micro"),
        ("micro", {"hiden_size": 64}, "hiden_size=64"),
        ("micro", {"hidden_size": 100}, "multiple of 32"),
        ("micro", {"num_hidden_layers": 9}, "compress_ratios"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path: Path, preset: str, overrides: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        write_random_checkpoint(tmp_path / "out", preset, 1, **overrides)
    assert not (tmp_path / "out").exists()
