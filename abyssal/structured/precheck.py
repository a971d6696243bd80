"""JSON schemas checked before they are compiled: what would not be enforced is refused, with its place.

The result is a schema in a small language that the engine is known to enforce exactly (`tests/structured` measures it):
formats have become patterns, patterns are spelled out, `oneOf` has become `anyOf` after a proof that no two branches
overlap, dependencies have become alternatives, references point to definitions of ours, drafts have been translated, and
definitions that no finite value satisfies have become `false`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .dialect import ANNOTATIONS
from .disjoint import find_overlap
from .document import Document, Json, SchemaError, child
from .objects import objects
from .productive import drop_references, find_loop, productive_definitions
from .scalars import Schema, constant, count, numbers, strings, types_of

MAX_DEPTH = 64
SPLIT_DEPTH = 20
"""Deeper parts become definitions: the engine reads JSON text nested up to 128 deep."""
MAX_SCHEMAS = 20_000
MAX_CONSTANTS = 10_000

_REFUSED = {
    "not": "is not enforced; say what is allowed instead",
    "if": "is not enforced; write the cases as branches of anyOf",
    "then": "is not enforced; write the cases as branches of anyOf",
    "else": "is not enforced; write the cases as branches of anyOf",
    "contains": "is not enforced; give prefixItems, or items for all",
    "minContains": "is not enforced",
    "maxContains": "is not enforced",
    "$dynamicRef": "is not enforced; use $ref",
    "$recursiveRef": "is not enforced; use $ref",
}
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies")
_HINTS = {
    "nullable": "is no keyword of JSON Schema; write type: [..., 'null']",
    "items": "as a list is no longer read in 2020-12; write prefixItems, or name an older draft in $schema",
}


@dataclass(frozen=True)
class CheckedSchema:
    """A schema that the engine enforces.

    Attributes:
        schema: in the engine's language, with its definitions under `$defs`.
        paths: place in the user's schema, by `id` of a part of `schema`.
    """

    schema: Schema
    paths: dict[int, str] = field(repr=False)

    @property
    def text(self) -> str:
        """The schema as JSON text."""
        return json.dumps(self.schema, ensure_ascii=False)


def check_schema(root: Json, path: str = "$", document: Document | None = None) -> CheckedSchema:
    """Check and rewrite a schema.

    Args:
        root: the parsed schema, an object or a boolean.
        path: how the root is called in messages.
        document: what references are resolved in, if not in `root` itself.

    Raises:
        SchemaError: naming the first place that would not be enforced.
    """
    return _Lowering(document or Document(root, path)).run(root, path)


class _Lowering:
    """One pass over one schema. References become definitions and are followed once each."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._dialect = document.dialect
        self._paths: dict[int, str] = {}
        self._names: dict[str, str] = {}
        self._pending: list[tuple[str, str, Json, int]] = []
        self._num_schemas = 0

    def run(self, root: Json, path: str) -> CheckedSchema:
        lowered = self.schema(root, path)
        definitions: dict[str, Schema | bool] = {}
        while self._pending:
            name, place, node, depth = self._pending.pop()
            definitions[name] = self.schema(node, place, depth)
        loop = find_loop(lowered, definitions)
        if loop is not None:
            place = next((place for place, name in self._names.items() if name == loop), path)
            raise SchemaError(child(place, "$ref"), "leads back to the same place: nothing decides whether a value is valid")
        productive = productive_definitions(lowered, definitions)
        if lowered is False or "" not in productive:
            raise SchemaError(path, "no finite value satisfies it")
        kept = {name: body for name, body in definitions.items() if name in productive}
        for part in (lowered, *kept.values()):
            drop_references(part, definitions.keys() - productive)
        schema: Schema = {} if lowered is True else {**lowered, "$defs": kept} if kept else lowered
        self._paths[id(schema)] = path
        return CheckedSchema(schema, self._paths)

    def schema(self, node: Json, path: str, depth: int = 0) -> Schema | bool:
        """Rewrite one schema."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise SchemaError(path, f"the schema has more than {MAX_SCHEMAS} parts")
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"schemas are nested more than {MAX_DEPTH} deep")
        if isinstance(node, bool):
            return node
        if depth and depth % SPLIT_DEPTH == 0 and path not in self._names:
            return self._refer(path, node, depth)
        if not isinstance(node, dict):
            raise SchemaError(path, f"a schema must be an object or a boolean, not {type(node).__name__}")
        self._check_keywords(node, path)
        blocks = {
            "own": self._own(node, path, depth),
            "$ref": self._reference(node, path),
            "allOf": self._branches(node, "allOf", path, depth),
            "anyOf": self._any_of(node, path, depth),
        }
        order = _textual_order(node)
        lowered: Schema = {}
        for name in sorted(blocks, key=order.__getitem__):
            _merge(lowered, blocks[name])
        self._paths[id(lowered)] = path
        return lowered

    def _check_keywords(self, node: dict[str, Json], path: str) -> None:
        for key in node:
            place = child(path, key)
            if key in ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):
                continue
            if key == "nullable" and node[key] is False:
                continue
            if key not in self._dialect.keywords:
                hint = _HINTS.get(key, f"is no keyword of {self._dialect.name} and would have no effect")
                raise SchemaError(place, hint)
            if key in _REFUSED:
                raise SchemaError(place, _REFUSED[key])
            if self._dialect.ref_alone and "$ref" in node and key != "$ref":
                raise SchemaError(place, f"has no effect beside $ref in {self._dialect.name}; put both under allOf")
        for key in ("unevaluatedProperties", "unevaluatedItems"):
            if key in node and any(applicator in node for applicator in _APPLICATORS):
                raise SchemaError(child(path, key), "is not enforced beside $ref, allOf, anyOf, oneOf or dependencies")
        if node.get("uniqueItems") is True and (count(node, "maxItems", path) or 2) > 1:
            raise SchemaError(child(path, "uniqueItems"), "is not enforced")

    def _own(self, node: dict[str, Json], path: str, depth: int) -> Schema:
        """The keywords that look at the value itself, contiguous and in one order."""
        types = types_of(node, path)
        own: Schema = {} if types is None else {"type": types[0] if len(types) == 1 else list(types)}
        extras: list[Schema] = []
        for key in ("enum", "const"):
            if key in node:
                values = self._constants(node, key, path)
                if "enum" in own:
                    extras.append({"enum": values})
                else:
                    own["enum"] = values
        own |= numbers(node, path, types, self._dialect)
        text, more = strings(node, path, types)
        own |= text | self._array(node, path, depth)
        rules = objects(node, path, self._document, lambda part, place: self.schema(part, place, depth + 1))
        own |= rules.to_schema()
        extras += more + rules.extras
        for part in extras:
            self._paths[id(part)] = path
        return own | ({"allOf": extras} if extras else {})

    def _constants(self, node: dict[str, Json], key: str, path: str) -> list[Json]:
        place = child(path, key)
        if key == "const":
            return [constant(node[key], place)]
        values = node[key]
        if not isinstance(values, list) or not values:
            raise SchemaError(place, "must be a list that is not empty")
        if len(values) > MAX_CONSTANTS:
            raise SchemaError(place, f"has {len(values)} values; the limit is {MAX_CONSTANTS}")
        return [constant(value, child(place, i)) for i, value in enumerate(values)]

    def _array(self, node: dict[str, Json], path: str, depth: int) -> Schema:
        own: Schema = {}
        items, items_path = node.get("items", True), child(path, "items")
        prefix = node.get("prefixItems")
        prefix_path = child(path, "prefixItems")
        if isinstance(items, list):
            if not self._dialect.tuple_items:
                raise SchemaError(items_path, _HINTS["items"])
            prefix, prefix_path = items, items_path
            items, items_path = node.get("additionalItems", True), child(path, "additionalItems")
        if "items" not in node and "unevaluatedItems" in node:
            items, items_path = node["unevaluatedItems"], child(path, "unevaluatedItems")
        if prefix is not None:
            if not isinstance(prefix, list):
                raise SchemaError(prefix_path, "must be a list of schemas")
            own["prefixItems"] = [self.schema(part, child(prefix_path, i), depth + 1) for i, part in enumerate(prefix)]
        if items is not True:
            own["items"] = self.schema(items, items_path, depth + 1)
        for key in ("minItems", "maxItems"):
            value = count(node, key, path)
            if value is not None:
                own[key] = value
        return own

    def _reference(self, node: dict[str, Json], path: str) -> Schema:
        if "$ref" not in node:
            return {}
        place, target = self._document.resolve(node["$ref"], child(path, "$ref"))
        return self._refer(place, target, 0)

    def _refer(self, place: str, target: Json, depth: int) -> Schema:
        """A reference to a definition of ours, which is made when it is met first."""
        if place not in self._names:
            self._names[place] = f"d{len(self._names)}"
            self._pending.append((self._names[place], place, target, depth))
        return {"$ref": f"#/$defs/{self._names[place]}"}

    def _branches(self, node: dict[str, Json], key: str, path: str, depth: int) -> Schema:
        if key not in node:
            return {}
        here, parts = child(path, key), node[key]
        if not isinstance(parts, list) or not parts:
            raise SchemaError(here, "must be a list of schemas that is not empty")
        return {key: [self.schema(part, child(here, i), depth + 1) for i, part in enumerate(parts)]}

    def _any_of(self, node: dict[str, Json], path: str, depth: int) -> Schema:
        """`anyOf`, and `oneOf` where it comes to the same."""
        unions = []
        if "anyOf" in node:
            unions.append(self._branches(node, "anyOf", path, depth))
        if "oneOf" in node:
            branches = self._branches(node, "oneOf", path, depth)["oneOf"]
            overlap = find_overlap(node["oneOf"], child(path, "oneOf"), self._document)
            if overlap is not None:
                exclusive = _exclusive_requirements(node["oneOf"])
                if exclusive is None:
                    raise SchemaError(
                        overlap[0],
                        f"may hold together with {overlap[1]}; oneOf is enforced where no value satisfies two branches, "
                        "such as with a required constant in each; or write anyOf",
                    )
                branches = exclusive
            unions.append({"anyOf": branches})
        if len(unions) == 2:
            return {"allOf": unions}
        return unions[0] if unions else {}


def _textual_order(node: dict[str, Json]) -> dict[str, int]:
    """Where each block begins in the text: earlier properties are written earlier."""
    order = {"own": len(node), "$ref": len(node), "allOf": len(node), "anyOf": len(node)}
    for position, key in enumerate(node):
        block = {"$ref": "$ref", "allOf": "allOf", "anyOf": "anyOf", "oneOf": "anyOf"}.get(key, "own")
        if key not in ANNOTATIONS:
            order[block] = min(order[block], position)
    return order


def _merge(lowered: Schema, block: Schema) -> None:
    """Add a block; several `allOf` become one."""
    for key, value in block.items():
        if key == "allOf" and key in lowered:
            lowered[key] = lowered[key] + value
        else:
            lowered[key] = value


def _exclusive_requirements(branches: list[Json]) -> list[Schema] | None:
    """`oneOf` of single required names: exactly one of them may occur. None for branches of another form."""
    names: list[Any] = []
    for branch in branches:
        if not isinstance(branch, dict) or set(branch) - ANNOTATIONS != {"required"} or len(branch["required"]) != 1:
            return None
        names += branch["required"]
    if len(set(names)) < len(names):
        return None
    return [
        {"type": "object", "required": [name], "properties": {other: False for other in names if other != name}}
        for name in names
    ]
