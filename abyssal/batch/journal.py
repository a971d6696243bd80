"""The journal beside the output: what the answers there were made from, so that nothing else goes on writing them.

It is written once, whole, before the first answer; which lines are answered is read from the answers themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from .answers import RESTART, sync_folder

SUFFIX = ".journal"
FORMAT = "abyssal batch 1"

LAYOUT_FACTS = ("ordered", "error_file")
"""Facts about where answers are written."""

Facts = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True)
class Journal:
    """A job's identity.

    Attributes:
        created: when it was begun, in seconds since 1970.
        facts: everything that decides what the answers are.
    """

    created: int
    facts: Facts

    @property
    def tag(self) -> str:
        """14 hex digits that stand for what the answers say, wherever and in whatever order they are written."""
        content = json.dumps({k: v for k, v in self.facts.items() if k not in LAYOUT_FACTS}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:14]

    def require(self, path: Path, facts: Facts) -> None:
        """Compare with the facts known of this run; those that only one side knows are passed over.

        Raises:
            ConfigError: listing what differs.
        """
        differing = [
            f"  {name}: {self.facts[name]!r} then, {value!r} now"
            for name, value in facts.items()
            if name in self.facts and self.facts[name] != value
        ]
        if differing:
            listed = "\n".join(differing)
            raise ConfigError(f"{path} was begun as another job:\n{listed}\nGo on with the same as then; or {RESTART}")


def journal_path(output: Path) -> Path:
    """Where the journal of an output lies."""
    return output.with_name(output.name + SUFFIX)


def read_journal(path: Path) -> Journal | None:
    """The journal, None if there is none.

    Raises:
        ConfigError: if it is damaged.
    """
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"journal {path} cannot be read: {error}; {RESTART}") from error
    known = isinstance(values, dict) and values.get("format") == FORMAT
    if not known or not isinstance(values.get("created"), int) or not isinstance(values.get("facts"), dict):
        raise ConfigError(f"journal {path} is not of the format {FORMAT!r}; {RESTART}")
    return Journal(values["created"], values["facts"])


def write_journal(path: Path, journal: Journal) -> None:
    """Replace the journal in one piece."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(journal)}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)
