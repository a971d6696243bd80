"""Answers on disk. An answer file is its own journal: each line names the input line that it answers.

A line is appended whole and counts once its newline is there. What a kill or a power cut leaves behind the last whole line
is cut off when the file is opened again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from ..core.errors import ConfigError

ID_PREFIX = "batch_req_"
RESTART = "give another output file, or begin anew with --restart, which deletes what is there"

_START = b'{"id":"' + ID_PREFIX.encode()
_END = b"}\n"
_SUCCESS_END = b',"error":null}\n'
_ID = re.compile(re.escape(_START) + rb'([0-9a-f]{10})([0-9a-f]{14})"')

log = logging.getLogger(__name__)


def answer_id(number: int, tag: str) -> str:
    """Id of the answer to a line: its number and the job's tag of 14 hex digits, the same on every run."""
    return f"{ID_PREFIX}{number:010x}{tag}"


class AnswerFile:
    """A file that answers are appended to, locked against other processes while it is open."""

    def __init__(self, path: Path) -> None:
        """Open or create.

        Raises:
            ConfigError: if it is no regular file, or another process writes to it.
            OSError: if it cannot be opened.
        """
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ConfigError(f"output {path} is no regular file; a batch must be able to read it again")
            self._lock()
            self._end = os.fstat(self._fd).st_size
        except BaseException:
            os.close(self._fd)
            raise
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it."""
        return self._end == 0

    def clear(self) -> None:
        """Delete all of it."""
        self._cut(0)

    def recover(self, tag: str) -> Iterator[tuple[int, bool]]:
        """Read what is there, then cut off an unfinished end.

        Yields:
            (number of the input line, whether its answer is an error) of every answer, in their order.

        Raises:
            ConfigError: for a line that is no answer of the job with this tag.
        """
        offset, broken = 0, None
        with self.path.open("rb") as file:
            for index, line in enumerate(file, 1):
                number = _number_of(line, tag)
                if number is not None and broken is None:
                    yield number, not line.endswith(_SUCCESS_END)
                elif number is not None or not _may_be_unfinished(line):
                    raise ConfigError(
                        f"{self.path}: line {index if number is None else broken} is no answer of this job; {RESTART}"
                    )
                elif broken is None:
                    broken = index
                offset += len(line) if broken is None else 0
        if broken is not None:
            log.warning("%s: line %d is unfinished; cut off, to be answered again", self.path, broken)
            self._cut(offset)

    def append(self, line: bytes) -> None:
        """Write one answer, newline included.

        Raises:
            OSError: if there is no room; the file is then as before.
        """
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._cut(self._end)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._end += len(line)

    def sync(self) -> None:
        """Have the disk keep what was appended."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Cut off an append that was interrupted, sync and unlock. Harmless when repeated."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._cut(self._end)
            self.sync()
        finally:
            os.close(self._fd)

    def _cut(self, num_bytes: int) -> None:
        if os.fstat(self._fd).st_size != num_bytes:
            os.ftruncate(self._fd, num_bytes)
        self._end = num_bytes

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"output {self.path} is being written by another process") from error
        except OSError as error:
            log.warning("%s cannot be locked (%s); see that no other process writes to it", self.path, error.strerror)


def sync_folder(path: Path) -> None:
    """Have the disk keep the names of the files in a folder, where its file system can."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _number_of(line: bytes, tag: str) -> int | None:
    """The input line that a whole answer belongs to."""
    match = _ID.match(line)
    if match is None or match[2] != tag.encode() or not line.endswith(_END) or b"\0" in line:
        return None
    return int(match[1], 16)


def _may_be_unfinished(line: bytes) -> bool:
    """Whether a line is what a kill leaves of an answer, or a power cut: blocks that were never written read as zeros."""
    if b"\0" in line:
        return True
    return not line.endswith(b"\n") and line[: len(_START)] == _START[: len(line)]
