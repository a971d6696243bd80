"""Writing to a terminal while text grows."""

from __future__ import annotations

import sys

from ..config import env

_DIM, _PLAIN = "\033[2m", "\033[0m"

_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Control characters and what stands for them on a terminal, which would otherwise obey what a model says."""


def on_terminal(text: str) -> str:
    """Text that is safe to print: unchanged unless stdout is a terminal."""
    return text.translate(_VISIBLE) if sys.stdout.isatty() else text


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
            safe = on_terminal(added)
            print(dim(safe) if self._dimmed else safe, end="", flush=True)
            self._shown = len(text)
