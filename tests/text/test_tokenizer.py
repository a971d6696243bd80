import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from abyssal.core.errors import CheckpointError, InvalidRequest
from abyssal.text.tokenizer import Tokenizer, eos_token_ids

TEXTS = ["Hello, world!", " a  b\n\n", "def f(x):\n    return x**2 ", "模型 café 😀", "12345 67"]


def model(vocab_size: int = 1000, eos: int = 1, bos: int = 0) -> SimpleNamespace:
    """As much of a ModelConfig as tokenizers look at."""
    return SimpleNamespace(bos_token_id=bos, eos_token_id=eos, text=SimpleNamespace(vocab_size=vocab_size))


@pytest.mark.parametrize("text", TEXTS)
def test_encode_puts_bos_before_the_ids_of_the_library(tokenizer: Tokenizer, text: str) -> None:
    plain = HuggingFaceTokenizer.from_file(str(tokenizer.path)).encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == [0, *plain]
    assert tokenizer.encode(text, add_bos=False) == plain
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_is_not_put_twice(tokenizer: Tokenizer) -> None:
    spelled = tokenizer.encode("<｜begin▁of▁sentence｜>Hi")
    assert spelled == tokenizer.encode("Hi")
    assert spelled.count(0) == 1


def test_special_tokens_spelled_in_plain_text_become_special(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.encode("<｜User｜>x", add_bos=False)[0] == tiny_tokenizer.token_id("<｜User｜>") == 5


def test_no_bos_where_the_model_has_none(tiny_tokenizer: Tokenizer) -> None:
    assert Tokenizer(tiny_tokenizer.path).encode("the") == tiny_tokenizer.encode("the")[1:]


def test_bytes_of_every_id_joined_are_the_text(tokenizer: Tokenizer) -> None:
    ids = range(0, tokenizer.vocab_size, 1 + tokenizer.vocab_size // 3000)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", errors="replace")
    assert joined == tokenizer.decode(list(ids), skip_special_tokens=False)


def test_vocab_size_and_special_ids(tiny_tokenizer: Tokenizer, v4_tokenizer: Tokenizer) -> None:
    assert v4_tokenizer.vocab_size == 129_280
    assert {0, 1, 2} <= v4_tokenizer.special_ids
    assert tiny_tokenizer.special_ids == frozenset(range(9))


def test_ids_without_a_token_stand_for_nothing(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.token_bytes(10**6) == b""
    assert tiny_tokenizer.decode([10**6]) == ""


def test_half_a_character_shows_as_replacement(tiny_tokenizer: Tokenizer) -> None:
    first = next(i for i in range(tiny_tokenizer.vocab_size) if tiny_tokenizer.token_bytes(i) == "é".encode()[:1])
    assert tiny_tokenizer.token_text(first) == "\ufffd"


def test_text_that_is_not_unicode_is_refused(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt=.*not valid Unicode.*character 2"):
        tiny_tokenizer.encode("ab\ud800")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path, model())


@pytest.mark.parametrize("content", ["", "{}", "[]", "not json", '{"version": "1.0"}'])
def test_malformed_file_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path, model())


def test_other_kinds_of_tokenizers_are_refused(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**json.loads(tiny_tokenizer.json_text), "decoder": None}))
    with pytest.raises(CheckpointError, match="not ByteLevel"):
        Tokenizer.from_folder(tmp_path, model())


def test_tokenizer_of_a_larger_model_is_refused(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match=r"has 3\d\d ids but the model only 100"):
        Tokenizer.from_folder(tiny_tokenizer.path.parent, model(vocab_size=100))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {1}),
        ("{}", {1}),
        ('{"eos_token_id": 7}', {1, 7}),
        ('{"eos_token_id": [1, 7, 9]}', {1, 7, 9}),
        ('{"eos_token_id": 0}', {0, 1}),
    ],
)
def test_eos_ids_of_both_files_are_merged(tmp_path: Path, content: str | None, expected: set[int]) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    assert eos_token_ids(tmp_path, model()) == expected


@pytest.mark.parametrize(
    "content", ["[]", "nonsense", '{"eos_token_id": "1"}', '{"eos_token_id": [true]}', '{"eos_token_id": 1000}']
)
def test_bad_eos_ids_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        eos_token_ids(tmp_path, model())
