import sys

import pytest

from abyssal.cli.terminal import GrowingText, dim, on_terminal

HOSTILE = "a\x1b[2J\x0e\r\x7f\x9b31m\n\tb é 😀"


def pretend_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_only_what_is_new_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    growing = GrowingText(dimmed=True)
    assert growing.is_empty
    for text in ("", "ab", "ab", "abc"):
        growing.show(text)
    assert not growing.is_empty
    assert capsys.readouterr().out == "abc"


def test_text_is_untouched_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_terminal(HOSTILE) == HOSTILE
    assert dim("x") == "x"


def test_a_terminal_does_not_obey_the_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_terminal(monkeypatch)
    assert on_terminal(HOSTILE) == "a␛[2J␎␍␡\ufffd31m\n\tb é 😀"
    GrowingText().show("\x1b[2J")
    assert capsys.readouterr().out == "␛[2J"


def test_dimmed_on_a_terminal_unless_colours_are_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_terminal(monkeypatch)
    assert dim("x") == "\x1b[2mx\x1b[0m"
    assert dim("") == ""
    monkeypatch.setenv("NO_COLOR", "1")
    assert dim("x") == "x"
