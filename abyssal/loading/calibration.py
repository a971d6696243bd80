"""Temperatures of the drafter's confidence head, as `abyssal calibrate` leaves them beside a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError

CALIBRATION_FILE = "draft_calibration.json"
REMEDY = "remove the file, and run `abyssal calibrate` again"


def read_temperatures(folder: Path, block_size: int, acceptance: str) -> tuple[float, ...] | None:
    """One temperature for each place of a draft block, or None if none were fitted for this kind of acceptance.

    Raises:
        ConfigError: if there is a file that is not of this model.
    """
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        return None
    values = _section(path, _content(path), "temperatures").get(acceptance)
    if values is None:
        return None
    are_numbers = isinstance(values, list) and all(isinstance(v, int | float) and math.isfinite(v) and v > 0 for v in values)
    if not are_numbers or len(values) != block_size:
        raise ConfigError(
            f"{path}: the temperatures for acceptance={acceptance} must be {block_size} positive numbers, one for each "
            f"place of the model's draft block; {REMEDY}"
        )
    return tuple(float(v) for v in values)


def write_temperatures(path: Path, temperatures: tuple[float, ...], acceptance: str, figures: dict[str, Any]) -> None:
    """Store fitted temperatures; those for the other kind of acceptance stay.

    Args:
        figures: what they were fitted on, for people to read.

    Raises:
        ConfigError: if the file cannot be written, or holds something else.
    """
    content = _content(path) if path.is_file() else {"temperatures": {}, "figures": {}}
    _section(path, content, "temperatures")[acceptance] = list(temperatures)
    _section(path, content, "figures")[acceptance] = figures
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); name another file with --out") from error


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no readable JSON ({error}); {REMEDY}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object; {REMEDY}")
    return content


def _section(path: Path, content: dict[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    if not isinstance(section, dict):
        raise ConfigError(f"{path} has no object {name!r}; {REMEDY}")
    return section
