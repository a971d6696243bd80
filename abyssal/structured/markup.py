"""Keeps tokens of plain text from spelling the marker of tool calls, which a parser of text would take for markup."""

from __future__ import annotations

from collections.abc import Iterator

from .vocabulary import DSML, Vocabulary


class SpelledMarker:
    """Finds the tokens that would complete the marker.

    Attributes:
        num_bytes: how much of the text before a token has to be known.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Look through the vocabulary once."""
        self._marker = DSML.encode()
        self.num_bytes = len(self._marker) - 1
        self._tokenizer = vocabulary.tokenizer
        self._text_ids = vocabulary.text_ids
        self._whole: list[int] = []
        self._endings: dict[bytes, list[int]] = {}
        starts = [self._marker[cut:] for cut in range(1, len(self._marker))]
        for token_id in sorted(vocabulary.text_ids):
            text = self._tokenizer.token_bytes(token_id)
            if self._marker in text:
                self._whole.append(token_id)
            for ending in starts:
                if text.startswith(ending):
                    self._endings.setdefault(ending, []).append(token_id)

    def completions(self, tail: bytes) -> Iterator[int]:
        """Ids that would complete the marker behind `tail`."""
        yield from self._whole
        for cut in range(1, len(self._marker)):
            if tail.endswith(self._marker[:cut]):
                yield from self._endings.get(self._marker[cut:], ())

    def is_completed(self, tail: bytes, token_id: int) -> bool:
        """Whether a token of text completes the marker behind `tail`."""
        return token_id in self._text_ids and self._marker in tail + self._tokenizer.token_bytes(token_id)
