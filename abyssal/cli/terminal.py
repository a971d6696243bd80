"""Writing to a terminal while text grows."""

from __future__ import annotations

import sys

from ..config import env

_DIM, _PLAIN = "\033[2m", "\033[0m"


def dim(text: str) -> str:
    """Faint text on a terminal, the same text elsewhere."""
    return f"{_DIM}{text}{_PLAIN}" if text and sys.stdout.isatty() and env.colours_allowed() else text


class GrowingText:
    """Prints the new end of a text each time it is shown."""

    def __init__(self, *, dimmed: bool = False) -> None:
        self._dimmed = dimmed
        self._shown = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was printed so far."""
        return self._shown == 0

    def show(self, text: str) -> None:
        """Print what was added since the last call."""
        added = text[self._shown :]
        if added:
            print(dim(added) if self._dimmed else added, end="", flush=True)
            self._shown = len(text)
