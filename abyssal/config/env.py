"""Environment variables: the only module that reads or sets them.

| variable | meaning |
|---|---|
| `ABYSSAL_CACHE_DIR` | where compiled kernels are kept; default `$XDG_CACHE_HOME/abyssal`, else `~/.cache/abyssal` |
| `ABYSSAL_LOG_LEVEL` | debug, info, warning (default) or error; what the package logs on the command line |
| `ABYSSAL_DEBUG` | 1 shows the traceback of errors that the command line otherwise reports in one line |
| `NO_COLOR` | if set, no colours on the terminal |

Downloads are kept where huggingface_hub keeps them (`HF_HOME`, `HF_HUB_CACHE`).
"""

from __future__ import annotations

import os
from pathlib import Path

from ..core.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")


def cache_dir() -> Path:
    """Folder for what can be made again, not created yet."""
    named = os.environ.get("ABYSSAL_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "abyssal"


def log_level() -> str:
    """The log level for the command line.

    Raises:
        ConfigError: for an unknown name.
    """
    level = os.environ.get("ABYSSAL_LOG_LEVEL", "warning").lower()
    if level not in LOG_LEVELS:
        raise ConfigError(f"ABYSSAL_LOG_LEVEL={level!r}: must be one of {', '.join(LOG_LEVELS)}")
    return level


def debug() -> bool:
    """Whether errors are shown with their traceback."""
    return os.environ.get("ABYSSAL_DEBUG", "0") not in ("", "0")


def colours_allowed() -> bool:
    """Whether a terminal may be coloured."""
    return not os.environ.get("NO_COLOR")


def prepare_process() -> None:
    """Settings that torch reads once, when it is imported. Called before that; what the user has set stays.

    Idle worker threads sleep instead of spinning: on a machine with other work, spinning ones wait for whole time slices of
    the scheduler in every parallel operation.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
