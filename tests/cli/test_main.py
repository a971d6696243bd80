"""The command line without a model: help, exit status, errors in one message."""

import io
import re
import shlex
import subprocess
import sys
import textwrap

import pytest

from abyssal import __version__
from abyssal.cli import generate
from abyssal.cli.main import main
from abyssal.core.errors import CheckpointError

COMMANDS = ("generate", "chat", "logits", "bench", "plan", "inspect", "make-checkpoint", "doctor")
NEEDS_MODEL = ("generate x", "chat", "bench offline", "logits --input-ids a --out b", "plan", "inspect")


def run_python(code: str, shell: str = "exec {}") -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter, inside a line of bash."""
    line = shell.format(f"{sys.executable} -c {shlex.quote(textwrap.dedent(code))}")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)


def test_help_lists_commands_and_does_not_import_torch() -> None:
    shown = run_python(
        """
        import sys
        from abyssal.cli.main import main
        try:
            main(["--help"])
        except SystemExit:
            print("torch" in sys.modules)
        """
    ).stdout
    assert shown.endswith("False\n")
    for command in COMMANDS:
        assert re.search(rf"^    {command}\s", shown, re.MULTILINE)


@pytest.mark.parametrize("command", [*COMMANDS, "bench offline"])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    assert f"usage: abyssal {command}" in capsys.readouterr().out


def test_module_and_version() -> None:
    shown = subprocess.run([sys.executable, "-m", "abyssal", "--version"], capture_output=True, text=True, check=True).stdout
    assert shown == f"abyssal {__version__}\n"


@pytest.mark.parametrize(
    "line", [["nonsense"], ["generate", "--no-such-flag"], ["bench"], ["generate", "--max-tok", "3"], []]
)
def test_unknown_words_exit_with_2(line: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line)
    assert caught.value.code == 2


@pytest.mark.parametrize("command", NEEDS_MODEL)
def test_without_a_model_one_message_says_how_to_get_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("abyssal: error: no model given")
    for way in ("make-checkpoint", "--model FOLDER", "--model flash"):
        assert way in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "nan"], "temperature=nan: must be a finite number in [0, inf)"),
        (["--top-p", "0"], "top_p=0.0: must be a finite number in (0, 1]"),
        (["--max-tokens", "-3"], "max_tokens=-3: must be an integer in [1, 2147483647]"),
        (["--min-tokens", "5", "--max-tokens", "3"], "min_tokens=5: must not exceed max_tokens=3"),
        (["--max-num-seqs", "0"], "max_num_seqs=0: must be a whole number of at least 1"),
        (["--numerics", "wrong"], "numerics='wrong': 'wrong' is none of released, exact, cache, window"),
        (["--prompt-file", "f"], "give prompts either as arguments or by --prompt-file, not both"),
    ],
)
def test_bad_values_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "no/such", *flags, "x"]) == 2
    captured = capsys.readouterr().err
    assert captured.startswith(f"abyssal: error: {message}")
    assert captured.count("\n") == 1


def test_no_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n  \n"))
    assert main(["generate", "--model", "m"]) == 2
    assert "no prompt: give one as an argument" in capsys.readouterr().err


def test_prompt_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "m", "--prompt-file", "no/such/file"]) == 2
    assert "--prompt-file no/such/file does not exist" in capsys.readouterr().err


def failing_with(error: BaseException):
    def run(args: object) -> int:
        raise error

    return run


def test_lists_of_problems_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "run", failing_with(CheckpointError("broken", ["a is missing", "b is short"])))
    assert main(["generate", "x"]) == 2
    assert capsys.readouterr().err == "abyssal: error: broken\n  - a is missing\n  - b is short\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "run", failing_with(CheckpointError("broken")))
    monkeypatch.setenv("ABYSSAL_DEBUG", "1")
    with pytest.raises(CheckpointError, match="broken"):
        main(["generate", "x"])


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(generate, "run", failing_with(KeyboardInterrupt()))
    assert main(["generate", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_files_that_cannot_be_opened_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "run", failing_with(PermissionError(13, "Permission denied", "some/file")))
    assert main(["generate", "x"]) == 2
    assert capsys.readouterr().err == "abyssal: error: some/file: Permission denied\n"


def test_a_bug_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "run", failing_with(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["generate", "x"])


def test_reader_that_leaves_is_no_error() -> None:
    done = run_python(
        """
        import sys
        from abyssal.cli import generate, main
        generate.run = lambda args: [print("x" * 1000) for _ in range(1000)] and 0
        sys.exit(main.main(["generate", "x"]))
        """,
        shell="set -o pipefail; {} | head -c 10",
    )
    assert (done.stdout, done.stderr, done.returncode) == ("x" * 10, "", 141)


def test_bad_log_level_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ABYSSAL_LOG_LEVEL", "loud")
    assert main(["generate", "x"]) == 2
    assert "ABYSSAL_LOG_LEVEL='loud': must be one of debug" in capsys.readouterr().err
