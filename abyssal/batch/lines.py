"""Lines of the input: read one by one in bounded memory, and taken apart as OpenAI's batch requests.

A line that is none is a `LineRefused`, which becomes its answer.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ..core.errors import AbyssalError, ConfigError
from .sets import DigestSet, LineSet

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"
URLS = (CHAT_URL, COMPLETION_URL)

MAX_LINE_BYTES = 64 * 2**20
"""A prompt of a million tokens takes about a tenth of this, with every character escaped."""

_CHUNK_BYTES = 2**20
_FIELDS = ("custom_id", "method", "url", "body")


class LineRefused(AbyssalError):
    """A line that gets an error for an answer.

    Attributes:
        code: a word for programs.
        parameter: what of the line is wrong, None for all of it.
        status: of HTTP if the line was a request as such, otherwise None.
        custom_id: of the line, where it was found.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        parameter: str | None = None,
        status: int | None = None,
        custom_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.parameter, self.status, self.custom_id = code, parameter, status, custom_id


@dataclass(frozen=True)
class BatchLine:
    """One request as it stands in the input.

    Attributes:
        number: of the line, from 1.
        url: one of `URLS`.
    """

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class InputScan:
    """What one pass over the input finds.

    Attributes:
        sha256: of all of it, in hex.
        num_requests: lines that are not blank.
    """

    sha256: str
    num_bytes: int
    num_requests: int

    @classmethod
    def of(cls, path: Path) -> InputScan:
        """Read a file once, in bounded memory.

        Raises:
            ConfigError: if it is no regular file, so that it could not be read again.
            OSError: if it cannot be read.
        """
        if path.exists() and not path.is_file():
            raise ConfigError(f"input {path} is no regular file; a batch reads its input more than once")
        digest, num_bytes, num_requests, is_blank = hashlib.sha256(), 0, 0, True
        with path.open("rb", buffering=_CHUNK_BYTES) as file:
            while piece := file.readline(_CHUNK_BYTES):
                digest.update(piece)
                is_blank = is_blank and _is_blank(piece, is_first=num_bytes == 0)
                num_bytes += len(piece)
                if piece.endswith(b"\n"):
                    num_requests += not is_blank
                    is_blank = True
        return cls(digest.hexdigest(), num_bytes, num_requests + (not is_blank))


class LineSource:
    """The lines that have no answer yet, in order. Lines that have one are read too, for their ids."""

    def __init__(self, file: BinaryIO, num_bytes: int, answered: LineSet) -> None:
        """Read the first `num_bytes` of a file; what is written behind them later is not looked at."""
        self._lines = _raw_lines(file, num_bytes)
        self._answered = answered
        self._custom_ids = DigestSet()

    def next(self) -> tuple[int, BatchLine | LineRefused | None] | None:
        """The next line's number with the request or the reason for refusing it; None at the end of the input.

        A blank line, or one with an answer, is None in place of the request, so that a caller has the chance to stop
        in between.
        """
        numbered = next(self._lines, None)
        if numbered is None:
            return None
        number, raw = numbered
        if raw is not None and _is_blank(raw):
            return number, None
        is_answered = number in self._answered
        try:
            line = self._parse(number, raw)
        except LineRefused as refused:
            return number, None if is_answered else refused
        return number, None if is_answered else line

    def _parse(self, number: int, raw: bytes | None) -> BatchLine:
        values = _json_object(number, raw)
        custom_id = values.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise LineRefused("invalid_custom_id", "custom_id must be a string, not empty", parameter="custom_id")
        if not self._custom_ids.add(custom_id):
            message = "custom_id was used by an earlier line; answers could not be told apart"
            raise LineRefused("duplicate_custom_id", message, parameter="custom_id", custom_id=custom_id)
        return _batch_line(number, custom_id, values)


def _is_blank(raw: bytes, *, is_first: bool = False) -> bool:
    """Whether there is nothing but white space, and at the beginning of a file perhaps a byte order mark."""
    return not (raw.removeprefix(codecs.BOM_UTF8) if is_first else raw).strip()


def _raw_lines(file: BinaryIO, num_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines, None for one that is too long."""
    left, number = num_bytes, 0
    while left > 0:
        raw = file.readline(min(left, MAX_LINE_BYTES + 1))
        if not raw:
            return
        number += 1
        left -= len(raw)
        if len(raw) <= MAX_LINE_BYTES:
            yield number, raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            continue
        is_blank = _is_blank(raw)
        while left > 0 and raw and not raw.endswith(b"\n"):
            raw = file.readline(min(left, _CHUNK_BYTES))
            left -= len(raw)
            is_blank = is_blank and _is_blank(raw)
        yield number, b"" if is_blank else None


def _json_object(number: int, raw: bytes | None) -> dict[str, Any]:
    if raw is None:
        raise LineRefused("line_too_long", f"line {number} is longer than {MAX_LINE_BYTES} bytes")
    try:
        values = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise LineRefused("invalid_json", f"line {number} is not UTF-8 text: {error}") from error
    except (ValueError, RecursionError) as error:
        raise LineRefused("invalid_json", f"line {number} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise LineRefused("invalid_json", f"line {number} is no JSON object but a {type(values).__name__}")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _batch_line(number: int, custom_id: str, values: dict[str, Any]) -> BatchLine:
    def refuse(code: str, name: str, expected: str) -> NoReturn:
        shown = f"{name}={values[name]!r:.80}" if name in values else f"{name} is missing"
        raise LineRefused(code, f"{shown}: {expected}", parameter=name, custom_id=custom_id)

    for name in values:
        if name not in _FIELDS:
            refuse("unknown_field", name, f"a batch line has {', '.join(_FIELDS)} and nothing else")
    if values.get("method") != "POST":
        refuse("unsupported_method", "method", "must be 'POST'")
    if values.get("url") not in URLS:
        refuse("unsupported_url", "url", f"must be one of {', '.join(URLS)}")
    if not isinstance(values.get("body"), dict):
        refuse("invalid_body", "body", "must be an object")
    return BatchLine(number, custom_id, values["url"], values["body"])
