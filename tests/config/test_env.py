import os
import subprocess
import sys
from pathlib import Path

import pytest

from abyssal.config import env
from abyssal.core.errors import ConfigError

PACKAGE = Path(env.__file__).parents[1]


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "home")
    for name in ("ABYSSAL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert env.cache_dir() == Path("home/.cache/abyssal")
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    assert env.cache_dir() == Path("xdg/abyssal")
    monkeypatch.setenv("ABYSSAL_CACHE_DIR", "~/mine")
    assert env.cache_dir() == Path("home/mine")


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABYSSAL_LOG_LEVEL", raising=False)
    assert env.log_level() == "warning"
    monkeypatch.setenv("ABYSSAL_LOG_LEVEL", "DEBUG")
    assert env.log_level() == "debug"
    monkeypatch.setenv("ABYSSAL_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="must be one of debug, info, warning, error"):
        env.log_level()


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_debug(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("ABYSSAL_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("ABYSSAL_DEBUG", value)
    assert env.debug() is expected


def test_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    env.prepare_process()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    env.prepare_process()
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_importing_llm_prepares_the_process() -> None:
    code = "import os, abyssal.llm; print(os.environ['OMP_WAIT_POLICY'])"
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean).stdout == "passive\n"


def test_no_other_module_reads_the_environment() -> None:
    readers = {
        p.relative_to(PACKAGE).as_posix()
        for p in PACKAGE.rglob("*.py")
        if "os.environ" in p.read_text() or "getenv" in p.read_text()
    }
    assert readers == {"config/env.py"}
