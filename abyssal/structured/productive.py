"""Recursion: which definitions have a finite value at all, and which refer to themselves without going deeper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from .scalars import TYPES

_PREFIX = "#/$defs/"


def productive_definitions(root: dict[str, Any] | bool, definitions: Mapping[str, dict[str, Any] | bool]) -> set[str]:
    """Names of the definitions that may have a finite value; the root is called `""`.

    Only recursion is looked at: a name is missing where every value would have to contain another one of its own kind.
    """
    everything = {**definitions, "": root}
    found: set[str] = set()
    while True:
        more = {name for name, schema in everything.items() if name not in found and _may_have_value(schema, found)}
        if not more:
            return found
        found |= more


def find_loop(root: dict[str, Any] | bool, definitions: Mapping[str, dict[str, Any] | bool]) -> str | None:
    """A definition that refers to itself at the same place of the value, or None. The root is called `""`."""
    everything = {**definitions, "": root}
    edges = {name: set(_in_place(schema)) for name, schema in everything.items()}
    while True:
        targets = set().union(*edges.values())
        outside = {name for name, onward in edges.items() if name not in targets or not onward & edges.keys()}
        if not outside:
            return min(edges) if edges else None
        edges = {name: onward for name, onward in edges.items() if name not in outside}


def _in_place(schema: dict[str, Any] | bool) -> Iterator[str]:
    """Definitions that the same value has to be looked at by."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].removeprefix(_PREFIX)
        for key in ("allOf", "anyOf"):
            for part in schema.get(key, ()):
                yield from _in_place(part)


def _may_have_value(schema: dict[str, Any] | bool, found: Set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix(_PREFIX) not in found:
        return False
    if not all(_may_have_value(part, found) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_may_have_value(part, found) for part in schema["anyOf"]):
        return False
    types = schema.get("type", TYPES)
    return any(_may_have_type(schema, name, found) for name in ([types] if isinstance(types, str) else types))


def _may_have_type(schema: dict[str, Any], name: str, found: Set[str]) -> bool:
    if name == "object":
        properties = schema.get("properties", {})
        return all(_may_have_value(properties.get(key, True), found) for key in schema.get("required", ()))
    if name == "array":
        prefix = schema.get("prefixItems", [])
        items = (
            prefix[i] if i < len(prefix) else schema.get("items", True)
            for i in range(min(schema.get("minItems", 0), len(prefix) + 1))
        )
        return all(_may_have_value(item, found) for item in items)
    return True


def drop_references(schema: Any, dead: Set[str]) -> None:
    """Make `false`, in place, of what refers to one of the `dead` definitions."""
    members = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for key, value in members:
        if key == "enum":
            continue
        if isinstance(value, dict) and str(value.get("$ref")).removeprefix(_PREFIX) in dead:
            schema[key] = False
        else:
            drop_references(value, dead)
