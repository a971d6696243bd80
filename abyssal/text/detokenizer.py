"""Text from token ids one by one, with stop strings found across token borders.

Each id is turned into its bytes and fed to an incremental UTF-8 decoder, so that the work for each id does not grow with the
text and a character appears only when its last byte has come. The whole text equals decoding all ids at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Container
from typing import Any

from ..core.sampling_params import SamplingParams
from .tokenizer import Tokenizer


class TextBuffer:
    """Text that grows by pieces and is joined only when it is read."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def append(self, piece: str) -> None:
        """Add text at the end."""
        if piece:
            self._pieces.append(piece)

    def __str__(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


class StopStrings:
    """Looks for stop strings in text that arrives in pieces.

    The one whose last character comes first wins; among those that end together, the longest. Text that may still turn
    out to begin a stop string is held back, at most one character less than the longest.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool) -> None:
        self._stop = stop
        self._include = include
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str, *, active: bool) -> str:
        """Take new text and return what may be shown.

        Once a stop string is found nothing more comes out. While not `active`, text is passed on whatever it spells, but a
        stop string may begin in it.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        match = self._first_match(text, len(self._held)) if active and piece else None
        if match is not None:
            end, self.found = match
            self._held = ""
            return text[: end if self._include else end - len(self.found)]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, old: int) -> tuple[int, str] | None:
        """End and stop string of the first match that ends after the first `old` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[0], best[2])

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with, the whole stop string excluded."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(len(s) > length and s.startswith(end) for s in self._stop):
                return length
        return 0


class IncrementalDetokenizer:
    """The text of one request while it is generated.

    Give it every generated id in order, except the one that ended the request by its id (leave that out unless
    `params.include_stop_str_in_output`). When `stop_string` is set after a `push`, the request has to end.

    Attributes:
        stop_string: the stop string that was found, or None.
    """

    reasoning: str | None = None

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, *, keep: Container[int] = (), stop_behind: int | None = None
    ) -> None:
        """Start empty.

        Args:
            keep: special ids that are shown even if `params.skip_special_tokens`.
            stop_behind: an id behind which stop strings are obeyed, the end of reasoning; None to obey them everywhere.
        """
        self._tokenizer = tokenizer
        self._min_tokens = params.min_tokens
        self._hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._keep = keep
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop_behind = stop_behind
        self._num_tokens = 0
        self._text = TextBuffer()

    @property
    def text(self) -> str:
        """All text that may be shown so far. Reading it costs a copy of what came since the last time."""
        return str(self._text)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """None: plain text has no calls."""
        return []

    @property
    def stop_string(self) -> str | None:
        return self._stops.found

    def push(self, token_id: int) -> str:
        """Take the next id; return the new text that may be shown, often nothing."""
        self._num_tokens += 1
        if token_id in self._hidden and token_id not in self._keep:
            return ""
        piece = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        shown = self._stops.push(piece, active=self._stop_behind is None and self._num_tokens >= self._min_tokens)
        if token_id == self._stop_behind:
            self._stop_behind = None
            shown += self._stops.flush()
        return self._show(shown)

    def finish(self) -> str:
        """End the text: show what was held back, and an unfinished character as U+FFFD. Harmless when repeated."""
        piece = self._utf8.decode(b"", final=True)
        shown = self._stops.push(piece, active=self._stop_behind is None and self._num_tokens >= self._min_tokens)
        return self._show(shown + self._stops.flush())

    def _show(self, piece: str) -> str:
        self._text.append(piece)
        return piece
