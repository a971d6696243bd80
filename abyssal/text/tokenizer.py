"""The checkpoint's tokenizer: text to ids and back, the bytes each id stands for, and which ids end a text."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from ..config.model import ModelConfig
from ..core.errors import CheckpointError, InvalidRequest

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"


class Tokenizer:
    """A byte-level BPE tokenizer, read from the `tokenizer.json` of a model folder.

    Attributes:
        bos_token_id: put before plain text; None if the model has none.
        path: the file it was read from.
    """

    def __init__(self, path: Path, bos_token_id: int | None = None) -> None:
        """Read one file.

        Raises:
            CheckpointError: if the file is missing, malformed, or not byte-level.
        """
        if not path.is_file():
            raise CheckpointError(
                f"no tokenizer: {path} does not exist. Put the {TOKENIZER_FILE} released with the checkpoint there"
            )
        try:
            self._json = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(self._json)
            decoder = json.loads(self._json).get("decoder")
        except Exception as error:  # the library raises bare Exception for malformed files
            raise CheckpointError(f"tokenizer {path} cannot be read: {error}") from error
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            raise CheckpointError(f"tokenizer {path}: its decoder is not ByteLevel, so that ids do not stand for bytes")
        self.path = path
        self.bos_token_id = bos_token_id
        self._special_ids = frozenset(i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig) -> Tokenizer:
        """The tokenizer of a model folder.

        Raises:
            CheckpointError: if it is missing, malformed, or holds ids the model has no embedding for.
        """
        tokenizer = cls(folder / TOKENIZER_FILE, config.bos_token_id)
        if tokenizer.vocab_size > config.text.vocab_size:
            raise CheckpointError(
                f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} ids but the model only {config.text.vocab_size}: "
                "it belongs to another model"
            )
        return tokenizer

    @functools.cached_property
    def vocab_size(self) -> int:
        """Greatest id plus one. The model may have more rows than this, which stand for no text."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out, as the file declares them."""
        return self._special_ids

    @property
    def json_text(self) -> str:
        """The content of `tokenizer.json`."""
        return self._json

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of plain text, BOS first unless the text spells it already.

        A special token spelled in `text` becomes that token, as with other engines: text of others should go through a
        chat prompt, where it cannot.

        Raises:
            InvalidRequest: for text that is not valid Unicode.
        """
        _require_unicode(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no character become U+FFFD. Ids without a token stand for nothing."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the file, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_text(self, token_id: int) -> str:
        """Text of one id alone, special tokens included; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; none for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else _spelled_bytes(token)
        return known


def eos_token_ids(folder: Path, config: ModelConfig) -> frozenset[int]:
    """Ids that end a text: the configuration's EOS, and those of `generation_config.json` if there is one.

    Raises:
        CheckpointError: if that file is malformed or names ids outside the vocabulary.
    """
    path = folder / GENERATION_FILE
    ids: object = None
    if path.is_file():
        try:
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for item in listed:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < config.text.vocab_size:
            raise CheckpointError(f"{path}: eos_token_id {item!r} is no id of a vocabulary of {config.text.vocab_size}")
    return frozenset({config.eos_token_id, *listed})


def _require_unicode(text: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequest("prompt", text, "must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest("prompt", text, f"is not valid Unicode: {error.reason} at character {error.start}") from error


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _spelled_bytes(token: str) -> bytes:
    """Bytes of a token as the file spells it. Added tokens with characters outside the alphabet stand for themselves."""
    try:
        return bytes([_ALPHABET[c] for c in token])
    except KeyError:
        return token.encode("utf-8")
