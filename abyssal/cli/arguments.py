"""Flags made from the configuration dataclasses: a flag is called as its field, and its help is the field's docstring."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import types
import typing
from collections.abc import Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from ..config.engine import ROUNDINGS, EngineConfig
from ..core.errors import ConfigError
from ..core.sampling_params import SamplingParams

MODEL_HELP = (
    "a folder with config.json, safetensors shards and tokenizer.json; a Hugging Face id such as owner/name, downloaded on "
    "first use; or `flash`, the released DeepSeek-V4.1-Flash"
)
NO_MODEL = (
    "no model given. Three ways to get one:\n"
    "  abyssal make-checkpoint --preset micro --seed 7 DIR    writes a small random model; then --model DIR\n"
    "  --model FOLDER                                         a checkpoint that you have\n"
    "  --model flash                                          downloads the released model (its size is shown first)"
)

_HELP = {
    "numerics": "roundings of the trained model that are applied: released (all four), exact (none), cache (all but "
    f"activations), or names separated by commas: {', '.join(ROUNDINGS)}"
}
_METAVARS = {int: "N", float: "X", str: "TEXT"}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add --model, --revision and --yes."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    group.add_argument("--revision", help="branch, tag or commit of a model from the hub")
    group.add_argument("--yes", action="store_true", help="download without asking")


def require_model(args: argparse.Namespace) -> str:
    """The model that the user named.

    Raises:
        ConfigError: saying how to get one, if none was named.
    """
    if not args.model:
        raise ConfigError(NO_MODEL)
    return str(args.model)


def add_engine(parser: argparse.ArgumentParser, *, skip: Collection[str] = ()) -> None:
    """Add one flag for each field of `EngineConfig`."""
    _add_fields(parser, "engine", EngineConfig, skip)


def add_sampling(parser: argparse.ArgumentParser, *, skip: Collection[str] = ()) -> None:
    """Add one flag for each field of `SamplingParams`."""
    _add_fields(parser, "sampling", SamplingParams, skip)


def given(args: argparse.Namespace, cls: type[Any], *, skip: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass that the user gave flags for."""
    return {f.name: getattr(args, f.name) for f in fields(cls) if f.name not in skip and hasattr(args, f.name)}


def positive_int(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def check_output(flag: str, path: Path) -> None:
    """Find out before the work is done that its result could not be stored.

    Raises:
        ConfigError: naming the flag.
    """
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: cannot be written; name another file")


def parse_bytes(text: str) -> int:
    """A number of bytes, with an optional unit: 4GiB, 500MB, 1e9.

    Raises:
        ArgumentTypeError: if it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmgt]i?|)b?\s*", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write 4GiB, 500MB or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit: 17=-2.5.

    Raises:
        ArgumentTypeError: if it is none.
    """
    match = re.fullmatch(r"(\d+)[=:]([-+]?\d+(?:\.\d*)?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no bias; write ID=NUMBER, as in 17=-2.5")
    return int(match[1]), float(match[2])


_ITEMS: dict[Any, dict[str, Any]] = {
    int: {"type": int, "metavar": "ID"},
    tuple[int, float]: {"type": parse_bias, "metavar": "ID=NUMBER"},
}
"""How one item of a repeated flag is read; others are texts."""


def field_help(cls: type[Any]) -> dict[str, str]:
    """Help for each field, from the Attributes section of the class's docstring."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def _add_fields(parser: argparse.ArgumentParser, title: str, cls: type[Any], skip: Collection[str]) -> None:
    group = parser.add_argument_group(title)
    hints, helps = typing.get_type_hints(cls), field_help(cls)
    for field in fields(cls):
        if field.name not in skip:
            default = "" if field.default in (None, (), MISSING) else f" [{field.default}]"
            options = _flag_options(field.name, hints[field.name])
            repeated = " May be given several times." if options.get("action") == "append" else ""
            text = (_HELP.get(field.name) or helps.get(field.name, "")) + repeated + default
            flag = "--" + field.name.replace("_", "-")
            group.add_argument(flag, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **options)


def _flag_options(name: str, hint: Any) -> dict[str, Any]:
    """What argparse has to know about a field's type."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is typing.Literal:
        return {"choices": arguments}
    if origin is tuple:
        return {"action": "append", **_ITEMS.get(arguments[0], {"type": str, "metavar": "TEXT"})}
    if name.endswith("_bytes"):
        return {"type": parse_bytes, "metavar": "BYTES"}
    return {"type": hint, "metavar": _METAVARS[hint]}
