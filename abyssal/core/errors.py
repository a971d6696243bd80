"""Exceptions a user can meet. Each names the value, the limit and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence


class AbyssalError(Exception):
    """Base class of every error raised on purpose."""


class InvalidRequest(AbyssalError, ValueError):
    """A request that cannot be served as asked.

    Attributes:
        parameter: name of the offending parameter, as the user spelled it.
        value: what was given.
    """

    def __init__(self, parameter: str, value: object, expected: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{parameter}={shown}: {expected}")
        self.parameter = parameter
        self.value = value


class ConfigError(AbyssalError, ValueError):
    """A config.json, an engine setting or a command line that this code does not support."""


class CheckpointError(AbyssalError):
    """A checkpoint that cannot be loaded. All problems found are listed in one error.

    Attributes:
        problems: one line for each.
    """

    SHOWN = 20

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        lines = [summary, *(f"  - {p}" for p in problems[: self.SHOWN])]
        if len(problems) > self.SHOWN:
            lines.append(f"  ... and {len(problems) - self.SHOWN} more")
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)


class ModelNotFound(AbyssalError, FileNotFoundError):
    """The model is neither a local folder nor available from the hub or its cache."""


class CapacityExceeded(AbyssalError):
    """The model, its caches or a request need more memory than there is."""


class UnsupportedOnBackend(AbyssalError):
    """A backend has no implementation of an op that the model needs."""
