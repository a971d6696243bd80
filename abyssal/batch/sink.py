"""Where answers go: one file or two, at once or in the order of the input."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from ..core.errors import ConfigError
from .answers import RESTART, AnswerFile
from .sets import LineSet

SYNC_SECONDS: Final = 5.0
"""What a power cut may cost at most. A killed process loses nothing that was written."""


class AnswerSink:
    """Writes answers, each line's once.

    Attributes:
        answered: numbers of the lines whose answer is written.
        num_failed: of these, errors.
    """

    def __init__(self, output: AnswerFile, errors: AnswerFile | None, *, ordered: bool) -> None:
        """Write to `output`, errors to `errors` if that is given."""
        self.answered = LineSet()
        self.num_failed = 0
        self._output, self._errors = output, errors
        self._ordered = ordered
        self._begun: deque[int] = deque()
        self._held: dict[int, tuple[bytes, bool]] = {}
        self._unsynced: set[AnswerFile] = set()
        self._next_sync = time.monotonic() + SYNC_SECONDS
        self._syncing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-sync")

    def close(self) -> None:
        """Wait for the disk. The files are synced once more when they are closed."""
        self._thread.shutdown()

    @property
    def num_open(self) -> int:
        """In order: lines from the first that was begun and is not written on. Otherwise 0: nothing is held."""
        return len(self._begun)

    def note(self, number: int, *, failed: bool) -> None:
        """An answer that a file holds already.

        Raises:
            ConfigError: if another answer for the line was found before.
        """
        if not self.answered.add(number):
            raise ConfigError(f"{self._output.path}: line {number} of the input is answered twice; {RESTART}")
        self.num_failed += failed

    def begin(self, number: int) -> None:
        """A line will be answered; to be called in the order of the input."""
        if self._ordered:
            self._begun.append(number)

    def put(self, number: int, line: bytes, *, failed: bool) -> None:
        """Write an answer, or hold it until those before it are written. A line that gets none holds up all behind it."""
        if not self._ordered:
            self._write(number, line, failed)
            return
        self._held[number] = line, failed
        while self._begun and self._begun[0] in self._held:
            first = self._begun.popleft()
            self._write(first, *self._held.pop(first))

    def sync_if_due(self) -> None:
        """Have the disk keep what is written, every few seconds, on a thread: a busy disk may take long.

        Raises:
            OSError: if the disk could not.
        """
        if self._syncing is not None and self._syncing.done():
            self._syncing.result()
            self._syncing = None
        now = time.monotonic()
        if self._syncing is None and self._unsynced and now >= self._next_sync:
            files, self._unsynced, self._next_sync = self._unsynced, set(), now + SYNC_SECONDS
            self._syncing = self._thread.submit(_sync, files)

    def _write(self, number: int, line: bytes, failed: bool) -> None:
        assert number not in self.answered, f"line {number} is answered twice"
        file = self._errors if failed and self._errors is not None else self._output
        file.append(line)
        self._unsynced.add(file)
        self.answered.add(number)
        self.num_failed += failed


def _sync(files: Iterable[AnswerFile]) -> None:
    for file in files:
        file.sync()
