"""One object of a JSON configuration, read key by key. Problems are collected, so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PLACEHOLDER = 1 << 31
"""Stands for a number that was refused; so large that bounds derived from it refuse nothing else."""


class Section:
    """Values of one JSON object.

    A reading method returns the value, or after noting a problem some value of the right type.

    Attributes:
        problems: one line each, `path.key=value: what is supported`; shared with the sections inside.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", problems: list[str] | None = None) -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()
        self.problems: list[str] = [] if problems is None else problems

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        """The raw value, None if missing."""
        return self._take(key)

    def refuse(self, key: str, supported: str) -> None:
        """Note that the value of `key` is not supported."""
        shown = repr(self._values[key]) if key in self._values else "<missing>"
        self.problems.append(f"{self._path}{key}={shown[:77] + '...' if len(shown) > 80 else shown}: {supported}")

    def section(self, key: str, *, optional: bool = False) -> Section:
        """The object under `key`; an empty one if it is missing."""
        value = self._take(key)
        if not isinstance(value, Mapping):
            if not optional or key in self._values:
                self.refuse(key, "must be an object")
            value = {}
        return Section(value, f"{self._path}{key}.", self.problems)

    def integer(
        self, key: str, *, least: int = 1, most: int | None = None, multiple_of: int = 1, default: int | None = None
    ) -> int:
        """A whole number in a range."""
        if key not in self._values and default is not None:
            return default
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, "must be a whole number")
        elif value < least or (most is not None and value > most):
            self.refuse(key, f"must be at least {least}" if most is None else f"must lie in {least}..{most}")
        elif value % multiple_of:
            self.refuse(key, f"must be a multiple of {multiple_of}")
        else:
            return value
        return PLACEHOLDER

    def number(self, key: str, *, above: float = 0.0, at_least: float | None = None) -> float:
        """A finite number greater than `above`, or not less than `at_least`."""
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "must be a number")
        elif at_least is not None and not at_least <= value < float("inf"):
            self.refuse(key, f"must be a number of at least {at_least:g}")
        elif at_least is None and not above < value < float("inf"):
            self.refuse(key, f"must be a number above {above:g}")
        else:
            return float(value)
        return 1.0

    def integers(self, key: str, *, least: int = 0, most: int | None = None, ascending: bool = False) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._take(key)
        if not isinstance(value, Sequence) or isinstance(value, str):
            self.refuse(key, "must be a list of whole numbers")
            return ()
        if any(isinstance(v, bool) or not isinstance(v, int) or v < least or (most is not None and v > most) for v in value):
            self.refuse(key, f"must hold whole numbers {f'of at least {least}' if most is None else f'in {least}..{most}'}")
            return ()
        if ascending and list(value) != sorted(set(value)):
            self.refuse(key, "must ascend")
            return ()
        return tuple(value)

    def fixed(self, key: str, supported: object, *, required: bool = False) -> None:
        """The one value that is supported; a missing key means it unless `required`."""
        if key not in self._values and not required:
            return
        value = self._take(key)
        if value != supported or isinstance(value, bool) != isinstance(supported, bool):
            self.refuse(key, f"only {supported!r} is supported")

    def ignore(self, *keys: str) -> None:
        """Keys that are known and change nothing."""
        self._read.update(keys)

    def unread(self) -> list[str]:
        """Full names of the keys that nothing asked for."""
        return [self._path + key for key in self._values if key not in self._read]

    def _take(self, key: str) -> Any:
        self._read.add(key)
        return self._values.get(key)
