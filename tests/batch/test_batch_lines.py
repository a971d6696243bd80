"""Reading lines: what is one, what is none, and that reading stays within bounds."""

import hashlib
import io
import json
from pathlib import Path

import pytest

from abyssal.batch import lines as module
from abyssal.batch.lines import BatchLine, InputScan, LineRefused, LineSource
from abyssal.batch.sets import LineSet
from abyssal.core.errors import ConfigError


def source_of(content: bytes, answered: tuple[int, ...] = ()) -> LineSource:
    numbers = LineSet()
    for number in answered:
        numbers.add(number)
    return LineSource(io.BytesIO(content), len(content), numbers)


def read_all(source: LineSource) -> list[tuple[int, BatchLine | LineRefused | None]]:
    return list(iter(source.next, None))


def line_of(custom_id: object = "a", **changes: object) -> bytes:
    values = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}, **changes}
    return json.dumps({k: v for k, v in values.items() if v is not ...}).encode()


def test_lines_are_numbered_from_1_and_blank_ones_are_none() -> None:
    content = b"\xef\xbb\xbf" + line_of("a") + b"\r\n\n \t\n" + line_of("b")
    read = read_all(source_of(content))
    assert [number for number, _ in read] == [1, 2, 3, 4]
    assert read[0][1] == BatchLine(1, "a", "/v1/completions", {"prompt": "x"})
    assert read[1][1] is read[2][1] is None
    assert read[3][1] == BatchLine(4, "b", "/v1/completions", {"prompt": "x"})


@pytest.mark.parametrize(
    ("raw", "code", "reason", "custom_id"),
    [
        (b"{nope", "invalid_json", "line 1 is no JSON: Expecting property name", None),
        (b'{"a": NaN}', "invalid_json", "NaN is no JSON number", None),
        (b"\xff\xfe", "invalid_json", "not UTF-8", None),
        (b"[" * 100_000, "invalid_json", "line 1 is no JSON", None),
        (b"9" * 5000, "invalid_json", "line 1 is no JSON", None),
        (b"[1]", "invalid_json", "no JSON object but a list", None),
        (line_of(...), "invalid_custom_id", "must be a string", None),
        (line_of(7), "invalid_custom_id", "must be a string", None),
        (line_of(""), "invalid_custom_id", "not empty", None),
        (line_of(method="GET"), "unsupported_method", "method='GET': must be 'POST'", "a"),
        (line_of(method=...), "unsupported_method", "method is missing", "a"),
        (
            line_of(url="/v1/embeddings"),
            "unsupported_url",
            "'/v1/embeddings': must be one of /v1/chat/completions, /v1/c",
            "a",
        ),
        (line_of(url=["/v1/completions"]), "unsupported_url", "must be one of", "a"),
        (line_of(body="x"), "invalid_body", "must be an object", "a"),
        (line_of(body=...), "invalid_body", "body is missing", "a"),
        (line_of(Body={}), "unknown_field", "Body={}: a batch line has custom_id, method, url, body", "a"),
    ],
)
def test_what_is_no_request_is_refused(raw: bytes, code: str, reason: str, custom_id: str | None) -> None:
    ((number, refused), (_, following)) = read_all(source_of(raw + b"\n" + line_of("next")))
    assert number == 1
    assert isinstance(refused, LineRefused)
    assert (refused.code, refused.custom_id, refused.status) == (code, custom_id, None)
    assert reason in str(refused)
    assert isinstance(following, BatchLine)


def test_a_second_line_of_an_id_is_refused_even_if_the_first_is_wrong_or_answered() -> None:
    content = b"\n".join([line_of("a", url="?"), line_of("b"), line_of("a"), line_of("b"), line_of("c")])
    for answered in [(), (1, 2)]:
        read = dict(read_all(source_of(content, answered)))
        for number in (3, 4):
            assert read[number].code == "duplicate_custom_id"
            assert read[number].custom_id == "ab"[number - 3]
        assert read[5].custom_id == "c"
        assert [read[1], read[2]] == [None, None] if answered else read[2].custom_id == "b"


def test_answered_lines_are_passed_over_whatever_they_are() -> None:
    assert read_all(source_of(b"{nope\n" + line_of("a"), (1,)))[0] == (1, None)


def test_a_line_that_is_too_long_is_refused_and_the_next_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 50)
    exact = line_of("a", body={"prompt": ""})
    exact = exact.replace(b'"prompt": ""', b'"prompt": "' + b"x" * (199 - len(exact)) + b'"') + b"\n"
    assert len(exact) == 200
    content = exact + line_of("b", body={"prompt": "x" * 500}) + b"\n" + line_of("c") + b"\n" + b"x" * 201
    read = dict(read_all(source_of(content)))
    assert read[1].custom_id == "a"
    assert (read[2].code, read[2].custom_id) == ("line_too_long", None)
    assert read[3].custom_id == "c"
    assert read[4].code == "line_too_long"
    assert len(read) == 4


def test_what_is_appended_later_is_not_read() -> None:
    first = line_of("a") + b"\n"
    source = LineSource(io.BytesIO(first + line_of("b")), len(first), LineSet())
    assert [number for number, _ in read_all(source)] == [1]


@pytest.mark.parametrize(
    ("content", "num_requests"),
    [
        (b"", 0),
        (b"a", 1),
        (b"a\n", 1),
        (b"a\n\n \r\nb", 2),
        (b"\n\n", 0),
        (b"\xef\xbb\xbf\na\n", 1),
        (b"   ", 0),
        (b" " * 300 + b"a\n", 1),
    ],
)
def test_scan(content: bytes, num_requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 64)
    (tmp_path / "in").write_bytes(content)
    scan = InputScan.of(tmp_path / "in")
    assert scan == InputScan(hashlib.sha256(content).hexdigest(), len(content), num_requests)
    read = read_all(LineSource(io.BytesIO(content), len(content), LineSet()))
    assert sum(line is not None for _, line in read) == num_requests


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no regular file"):
        InputScan.of(tmp_path)
