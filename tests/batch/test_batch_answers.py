"""Answer files: what an interruption leaves is cut off, what is whole is never touched, what is foreign is never deleted."""

import errno
import logging
import multiprocessing
import os
from pathlib import Path

import pytest

from abyssal.batch.answers import AnswerFile, answer_id
from abyssal.core.errors import ConfigError

TAG = "0123456789abcd"


def answer(number: int, tag: str = TAG, *, error: str = "null", content: str = "x") -> bytes:
    return f'{{"id":"{answer_id(number, tag)}","custom_id":"{content}","response":null,"error":{error}}}\n'.encode()


def recovered(path: Path) -> list[tuple[int, bool]]:
    with AnswerFile(path) as file:
        return list(file.recover(TAG))


def test_recovery_tells_which_lines_are_answered_and_how(tmp_path: Path) -> None:
    content = answer(3) + answer(2**39, error='{"code":"x"}') + answer(1, content="é\u2028")
    (tmp_path / "out").write_bytes(content)
    assert recovered(tmp_path / "out") == [(3, False), (2**39, True), (1, False)]
    assert (tmp_path / "out").read_bytes() == content


def test_an_unfinished_line_is_cut_off_wherever_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, last = answer(1) + answer(2), answer(3)
    for length in range(len(last)):
        (tmp_path / "out").write_bytes(whole + last[:length])
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert recovered(tmp_path / "out") == [(1, False), (2, False)]
        assert (tmp_path / "out").read_bytes() == whole
        assert ("line 3 is unfinished" in caplog.text) == (length > 0)
        with AnswerFile(tmp_path / "out") as file:
            file.append(last)
        assert recovered(tmp_path / "out")[-1] == (3, False)


@pytest.mark.parametrize("tail", [bytes(5000), answer(2)[:20] + bytes(60) + b"\n", b"\0\n\0\n"])
def test_blocks_that_a_power_cut_left_empty_are_cut_off(tail: bytes, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(answer(1) + tail)
    assert recovered(tmp_path / "out") == [(1, False)]
    assert (tmp_path / "out").read_bytes() == answer(1)


@pytest.mark.parametrize(
    "content",
    [
        b"a text\n",
        b"a text",
        answer(1) + b"a text",
        answer(1) + b"\n",
        answer(1) + answer(2, "f" * 14),
        answer(1) + answer(2)[:-2] + b"\n" + answer(3),
        answer(1) + bytes(10) + b"\n" + answer(3),
    ],
)
def test_what_is_no_answer_of_the_job_is_left_alone(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(ConfigError, match=r"is no answer of this job.*--restart"):
        recovered(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_append_that_fails_halfway_leaves_the_file_as_it_was(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = os.write, []

    def write(fd: int, data: bytes) -> int:
        if written:
            raise error
        written.append(real(fd, data[: len(data) // 2]))
        return written[0]

    with AnswerFile(tmp_path / "out") as file:
        file.append(answer(1))
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(type(error)) as caught:
            file.append(answer(2))
    assert (tmp_path / "out").read_bytes() == answer(1)
    if isinstance(error, OSError):
        assert caught.value.filename == str(tmp_path / "out")


def _hold(path: str, opened: object, done: object) -> None:
    with AnswerFile(Path(path)):
        opened.set()
        done.wait(60)


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    opened, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path / "out"), opened, done))
    process.start()
    try:
        assert opened.wait(60)
        with pytest.raises(ConfigError, match="is being written by another process"):
            AnswerFile(tmp_path / "out")
    finally:
        done.set()
        process.join()
    AnswerFile(tmp_path / "out").close()


def test_a_pipe_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no regular file"):
        AnswerFile(Path("/dev/null"))
    with pytest.raises(OSError, match="Is a directory"):
        AnswerFile(tmp_path)
