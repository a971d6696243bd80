"""What a grammar has to know of the vocabulary: how many rows the model has, what ids stand for, which are markup."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ..core.errors import ConfigError
from .mask import Mask, mask_of

THINK_END = "</think>"
DSML = "｜DSML｜"


class Tokenizer(Protocol):
    """What is needed of a tokenizer; `abyssal.text.tokenizer.Tokenizer` is one."""

    @property
    def json_text(self) -> str:
        """The content of `tokenizer.json`."""

    @property
    def vocab_size(self) -> int:
        """Greatest id plus one."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for."""


@dataclass(frozen=True)
class Vocabulary:
    """The ids of one model.

    Attributes:
        size: rows of the model's output; ids without a token are never allowed.
        tokenizer: spells the ids.
        eos_ids: ids that end every request, at least one.
        control_ids: added tokens, special or not: markup that no text, string or expression may contain.
        think_end_id: `</think>`, None if the tokenizer has none.
        dsml_id: the marker of tool calls, None if the tokenizer has none.
    """

    size: int
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    control_ids: frozenset[int]
    think_end_id: int | None
    dsml_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos_ids: Iterable[int]) -> Vocabulary:
        """Read the added tokens of a tokenizer.

        Raises:
            ConfigError: without an EOS id, or with ids outside of the model's rows.
        """
        added = {
            int(token["id"]): str(token["content"]) for token in json.loads(tokenizer.json_text).get("added_tokens", [])
        }
        ends = frozenset(eos_ids)
        if not ends or min(ends) < 0 or max(ends) >= size or tokenizer.vocab_size > size:
            raise ConfigError(f"EOS ids {sorted(ends)} and {tokenizer.vocab_size} tokens do not fit a model of {size} rows")
        by_text = {text: token_id for token_id, text in added.items()}
        return cls(size, tokenizer, ends, frozenset(added) | ends, by_text.get(THINK_END), by_text.get(DSML))

    @functools.cached_property
    def key(self) -> str:
        """Hash of what grammars compiled for it depend on."""
        content = f"{self.size} {sorted(self.eos_ids)} {self.tokenizer.json_text}"
        return hashlib.sha256(content.encode()).hexdigest()

    @functools.cached_property
    def known_ids(self) -> frozenset[int]:
        """Ids that have a token."""
        return frozenset(i for i in range(self.tokenizer.vocab_size) if self.tokenizer.token_bytes(i))

    @functools.cached_property
    def text_ids(self) -> frozenset[int]:
        """Ids that stand for text: everything but markup and ids without a token."""
        return self.known_ids - self.control_ids

    @functools.cached_property
    def known_mask(self) -> Mask:
        """int32 [words] that allows `known_ids`."""
        return mask_of(self.known_ids, self.size)

    @functools.cached_property
    def text_mask(self) -> Mask:
        """int32 [words] that allows `text_ids`."""
        return mask_of(self.text_ids, self.size)
