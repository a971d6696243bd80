"""Proof that no value satisfies two schemas at once, which makes `oneOf` the same as `anyOf`.

Looks at types, constants, bounds, lengths, and at properties that one side requires: the usual tagged unions are proved. Not
finding a proof says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .document import Document, Json, SchemaError, child

_KINDS = {
    "null": {"null"},
    "boolean": {"boolean"},
    "integer": {"integer"},
    "number": {"integer", "fraction"},
    "string": {"string"},
    "array": {"array"},
    "object": {"object"},
}
_ALL_KINDS = frozenset().union(*_KINDS.values())
MAX_DEPTH = 12
MAX_STEPS = 20_000


def equal(a: Json, b: Json) -> bool:
    """Equality of JSON values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return bool(a == b)


class Disjointness:
    """Proofs about the schemas of one document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._steps = 0

    def prove(self, a: Json, b: Json, depth: int = 0) -> bool:
        """Whether it is certain that no value satisfies both `a` and `b`."""
        self._steps += 1
        if depth > MAX_DEPTH or self._steps > MAX_STEPS:
            return False
        views_a, views_b = list(self._views(a, depth)), list(self._views(b, depth))
        common = self._kinds(views_a, depth) & self._kinds(views_b, depth)
        if not common:
            return True
        values_a, values_b = _values(views_a), _values(views_b)
        if values_a is not None and values_b is not None and not any(equal(x, y) for x in values_a for y in values_b):
            return True
        if self._split(views_a, b, depth) or self._split(views_b, a, depth):
            return True
        return all(self._prove_kind(kind, views_a, views_b, depth) for kind in common)

    def _split(self, views: list[dict[str, Any]], other: Json, depth: int) -> bool:
        """A union is disjoint from `other` if each of its branches is."""
        unions = [view[key] for view in views for key in ("anyOf", "oneOf") if isinstance(view.get(key), list)]
        return any(all(self.prove(branch, other, depth + 1) for branch in union) for union in unions)

    def _views(self, node: Json, depth: int) -> Iterator[dict[str, Any]]:
        """The schemas that a value has to satisfy together: the node itself, what it refers to, the parts of its `allOf`."""
        if node is False:
            yield {"type": []}
        if not isinstance(node, dict) or depth > MAX_DEPTH:
            return
        yield node
        if "$ref" in node:
            try:
                yield from self._views(self._document.resolve(node["$ref"], "$ref")[1], depth + 1)
            except SchemaError:
                return
        for part in node["allOf"] if isinstance(node.get("allOf"), list) else ():
            yield from self._views(part, depth + 1)

    def _kinds(self, views: list[dict[str, Any]], depth: int) -> set[str]:
        kinds = set(_ALL_KINDS)
        for view in views:
            listed = view.get("type", list(_KINDS))
            names = listed if isinstance(listed, list) else [listed]
            kinds &= set().union(*(_KINDS.get(name, set()) for name in names if isinstance(name, str)))
            for key in ("anyOf", "oneOf"):
                if isinstance(view.get(key), list) and depth < MAX_DEPTH:
                    branches = (self._kinds(list(self._views(branch, depth + 1)), depth + 1) for branch in view[key])
                    kinds &= set().union(*branches)
        values = _values(views)
        return kinds if values is None else kinds & set().union(*map(_kinds_of, values))

    def _prove_kind(self, kind: str, a: list[dict[str, Any]], b: list[dict[str, Any]], depth: int) -> bool:
        if kind == "object":
            return self._prove_objects(a, b, depth)
        if kind in ("integer", "fraction"):
            (low_a, high_a), (low_b, high_b) = _range(a), _range(b)
            return high_a < low_b or high_b < low_a
        keys = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}.get(kind)
        if keys is None:
            return False
        low, high = max(_least(a, keys[0]), _least(b, keys[0])), min(_most(a, keys[1]), _most(b, keys[1]))
        return low > high

    def _prove_objects(self, a: list[dict[str, Any]], b: list[dict[str, Any]], depth: int) -> bool:
        required = {
            name
            for view in a + b
            for name in (view["required"] if isinstance(view.get("required"), list) else ())
            if isinstance(name, str)
        }
        return any(
            self.prove(x, y, depth + 1)
            for name in sorted(required)
            for x in (_member(view, name) for view in a)
            for y in (_member(view, name) for view in b)
        )


def find_overlap(branches: list[Json], path: str, document: Document) -> tuple[str, str] | None:
    """Two branches that are not proved disjoint, by their paths; None if all pairs are."""
    proofs = Disjointness(document)
    for i, a in enumerate(branches):
        for j in range(i + 1, len(branches)):
            if not proofs.prove(a, branches[j]):
                return child(path, i), child(path, j)
    return None


def _values(views: list[dict[str, Any]]) -> list[Json] | None:
    """The only values possible, None if they are not listed."""
    for view in views:
        if "const" in view:
            return [view["const"]]
        if isinstance(view.get("enum"), list):
            return list(view["enum"])
    return None


def _kinds_of(value: Json) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, float):
        return {"integer", "fraction"} if value.is_integer() else {"fraction"}
    names = {int: "integer", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _range(views: list[dict[str, Any]]) -> tuple[float, float]:
    """Bounds of numbers; exclusive ones count as inclusive."""
    low = max(_least(views, "minimum", -math.inf), _least(views, "exclusiveMinimum", -math.inf))
    high = min(_most(views, "maximum"), _most(views, "exclusiveMaximum"))
    return low, high


def _least(views: list[dict[str, Any]], key: str, default: float = 0) -> float:
    return max((v[key] for v in views if _is_number(v.get(key))), default=default)


def _most(views: list[dict[str, Any]], key: str) -> float:
    return min((v[key] for v in views if _is_number(v.get(key))), default=math.inf)


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _member(view: dict[str, Any], name: str) -> Json:
    """What one schema alone says of a member; True where it says nothing certain."""
    properties = view.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    if "patternProperties" in view or "propertyNames" in view:
        return True
    return view.get("additionalProperties", True)
