"""A JSON schema as a document: parsed without losing anything, its draft, and the parts its references point to."""

from __future__ import annotations

import json
from typing import Any, TypeAlias
from urllib.parse import unquote

from ..core.errors import InvalidRequest
from .dialect import LATEST, Dialect, find_dialect, known_dialects

Json: TypeAlias = Any
"""What `json.loads` returns."""

MAX_TEXT_BYTES = 1 << 20


class SchemaError(Exception):
    """A part of a schema that would not be enforced.

    Attributes:
        path: where, in the form `$.properties.a.not`.
        reason: what is wrong and, where there is a way, what to write instead.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[SchemaError], tuple[str, str]]:
        return SchemaError, (self.path, self.reason)


def child(path: str, key: str | int) -> str:
    """Path of a member or an item."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    plain = key.replace("_", "a").replace("$", "a").replace("-", "a")
    return f"{path}.{key}" if plain.isalnum() else f"{path}[{json.dumps(key, ensure_ascii=False)}]"


def parse_json(parameter: str, text: str) -> Json:
    """Parse JSON text in which no name may occur twice and every number is finite.

    Raises:
        InvalidRequest: naming `parameter`.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(parameter, text, f"is not JSON: {error}") from error


def dump_json(parameter: str, value: Json) -> str:
    """JSON text of a value, in which the order of names is kept.

    Raises:
        InvalidRequest: naming `parameter`, for values that are no JSON and for texts over 1 MiB.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        size = len(text.encode("utf-8"))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(parameter, value, f"is not JSON: {error}") from error
    if size > MAX_TEXT_BYTES:
        raise InvalidRequest(parameter, text, f"has {size} bytes; the limit is {MAX_TEXT_BYTES}")
    return text


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} occurs twice in one object")
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


class Document:
    """A root schema and what can be found in it.

    Attributes:
        root: the parsed schema.
        path: of the root, as shown in messages.
        dialect: the draft it is read by; 2020-12 unless `$schema` names another.
    """

    def __init__(self, root: Json, path: str = "$") -> None:
        """Read the draft and collect the anchors.

        Raises:
            SchemaError: for an unknown draft or an `$id` below the root.
        """
        self.root = root
        self.path = path
        self.dialect = self._find_dialect()
        self._base = ""
        self._anchors: dict[str, tuple[str, Json]] = {}
        if isinstance(root, dict):
            base = root.get("$id", root.get("id", ""))
            self._base = base.split("#")[0] if isinstance(base, str) else ""
            self._collect(root, path, is_root=True)

    def _find_dialect(self) -> Dialect:
        uri = self.root.get("$schema") if isinstance(self.root, dict) else None
        if uri is None:
            return LATEST
        dialect = find_dialect(uri) if isinstance(uri, str) else None
        if dialect is None:
            raise SchemaError(child(self.path, "$schema"), f"unknown draft {uri!r}; known are {known_dialects()}")
        return dialect

    def _collect(self, node: Json, path: str, *, is_root: bool = False) -> None:
        """Find anchors everywhere but in values, where a name is only a name."""
        stack = [(node, path, is_root)]
        while stack:
            node, path, is_root = stack.pop()
            if isinstance(node, list):
                stack += [(item, child(path, i), False) for i, item in enumerate(node)]
            if not isinstance(node, dict):
                continue
            identifier = node.get("$id", node.get("id") if self.dialect.boolean_exclusive else None)
            if isinstance(identifier, str) and identifier.startswith("#"):
                self._anchors[identifier[1:]] = (path, node)
            elif isinstance(identifier, str) and not is_root:
                raise SchemaError(
                    child(path, "$id"), "a part with its own $id is not supported; use $defs and #/$defs/... in $ref"
                )
            if isinstance(node.get("$anchor"), str):
                self._anchors[node["$anchor"]] = (path, node)
            for key, value in node.items():
                if key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
                    members = value.items() if isinstance(value, dict) else ()
                    stack += [(v, child(child(path, key), k), False) for k, v in members]
                elif key not in ("enum", "const", "default", "examples", "example"):
                    stack.append((value, child(path, key), False))

    def resolve(self, reference: Json, path: str) -> tuple[str, Json]:
        """Path and content of what a `$ref` at `path` points to.

        Raises:
            SchemaError: if it is malformed, remote, or points nowhere.
        """
        if not isinstance(reference, str):
            raise SchemaError(path, "must be a string")
        base, _, fragment = reference.partition("#")
        if base and base != self._base:
            raise SchemaError(path, f"{reference!r} lies outside of this schema; put what it means under $defs")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get(fragment)
            if found is None:
                raise SchemaError(path, f"{reference!r} points nowhere: there is no such $anchor")
            return found
        return self._point(fragment, reference, path)

    def _point(self, pointer: str, reference: str, path: str) -> tuple[str, Json]:
        node, place = self.root, self.path
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node, place = node[key], child(place, key)
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node, place = node[int(key)], child(place, int(key))
            else:
                raise SchemaError(path, f"{reference!r} points nowhere: {place} has no {key!r}")
        return place, node
