"""Keywords of objects, rewritten into properties, patterns and one rule for all other names.

The engine writes declared properties in their declared order and each at most once, but does not notice when another name
comes twice. Counts of members are therefore kept only where repeated names cannot falsify them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .dialect import ANNOTATIONS
from .document import Document, Json, SchemaError, child
from .regex import RegexError, rewrite
from .scalars import Schema, count

MAX_PROPERTIES = 1000
MAX_ALTERNATIVES = 16
"""Optional properties among which a count may choose."""

Lower = Callable[[Json, str], "Schema | bool"]


@dataclass
class ObjectRules:
    """What an object may hold.

    Attributes:
        properties: by name, in the order they are written.
        patterns: by regular expression in the engine's syntax.
        others: every other name.
        required: names that must occur.
        extras: schemas to be met besides.
    """

    properties: dict[str, Schema | bool] = field(default_factory=dict)
    patterns: dict[str, Schema | bool] = field(default_factory=dict)
    others: Schema | bool = True
    required: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    extras: list[Schema] = field(default_factory=list)

    @property
    def is_closed(self) -> bool:
        """Only declared names are allowed."""
        return self.others is False and not self.patterns

    @property
    def optional(self) -> list[str]:
        """Declared names that may be left out."""
        return [name for name, schema in self.properties.items() if name not in self.required and schema is not False]

    def to_schema(self) -> Schema:
        """In the engine's words; keywords without effect are left out."""
        own: Schema = {}
        if self.properties:
            own["properties"] = self.properties
        if self.patterns:
            own["patternProperties"] = self.patterns
        if self.others is not True:
            own["additionalProperties"] = self.others
        if self.required:
            own["required"] = self.required
        return own | self.counts


def objects(node: dict[str, Json], path: str, document: Document, lower: Lower) -> ObjectRules:
    """Read the keywords of objects.

    Raises:
        SchemaError: for those that would not be enforced.
    """
    rules = ObjectRules(required=_names(node.get("required", []), child(path, "required")))
    _read_properties(node, path, lower, rules)
    if "propertyNames" in node:
        _restrict_names(node["propertyNames"], child(path, "propertyNames"), document, rules)
    _read_dependencies(node, path, lower, rules)
    _check_reachable(rules, path)
    _limit_members(node, path, rules)
    return rules


def _read_properties(node: dict[str, Json], path: str, lower: Lower, rules: ObjectRules) -> None:
    here = child(path, "properties")
    declared = _members(node.get("properties", {}), here)
    if len(declared) > MAX_PROPERTIES:
        raise SchemaError(here, f"has {len(declared)} properties; the limit is {MAX_PROPERTIES}")
    for name, schema in declared.items():
        if any(0xD800 <= ord(c) <= 0xDFFF for c in name):
            raise SchemaError(here, f"the name {name!r} holds half of a surrogate pair")
        rules.properties[name] = lower(schema, child(here, name))
    if "additionalProperties" in node:
        rules.others = lower(node["additionalProperties"], child(path, "additionalProperties"))
    elif "unevaluatedProperties" in node:
        rules.others = lower(node["unevaluatedProperties"], child(path, "unevaluatedProperties"))
    _read_patterns(node, path, lower, rules)


def _read_patterns(node: dict[str, Json], path: str, lower: Lower, rules: ObjectRules) -> None:
    here = child(path, "patternProperties")
    source = _members(node.get("patternProperties", {}), here)
    for pattern, schema in source.items():
        place = child(here, pattern)
        try:
            rewritten = rewrite(pattern)
        except RegexError as error:
            raise SchemaError(place, str(error)) from error
        # Names on which readers disagree must not slip through as "other" names or under another pattern.
        plain = all(name.isascii() and name.isprintable() for name in [*rules.properties, *rules.required])
        if not rewritten.is_exact and not (rules.others is False and len(source) == 1 and plain):
            raise SchemaError(
                place, "matches different names for different readers; write [0-9] for \\d, [^\\n\\r] for ., and the like"
            )
        if rewritten.text in rules.patterns:
            raise SchemaError(place, "means the same as another pattern here")
        rules.patterns[rewritten.text] = lower(schema, place)


def _restrict_names(names: Json, path: str, document: Document, rules: ObjectRules) -> None:
    """Apply `propertyNames`, for names given by a list, a pattern or their length."""
    seen: set[str] = set()
    while isinstance(names, dict) and set(names) - ANNOTATIONS == {"$ref"} and path not in seen:
        seen.add(path)
        path, names = document.resolve(names["$ref"], child(path, "$ref"))
    if names is True:
        return
    if names is False:
        names = {"enum": []}
    if not isinstance(names, dict):
        raise SchemaError(path, "must be an object or a boolean")
    keys = set(names) - ANNOTATIONS - {"type"}
    if names.get("type", "string") != "string" or rules.patterns:
        raise SchemaError(path, "is enforced only for strings, and without patternProperties beside it")
    if keys <= {"minLength", "maxLength"} or keys == {"pattern"}:
        _restrict_by_pattern(names, path, rules)
    elif keys in ({"enum"}, {"const"}):
        listed = names["enum"] if "enum" in names else [names["const"]]
        _restrict_to_list([name for name in listed if isinstance(name, str)], rules)
    else:
        raise SchemaError(path, "is enforced only as enum, const, pattern, or minLength and maxLength, one of them")


def _restrict_to_list(allowed: list[str], rules: ObjectRules) -> None:
    for name in rules.properties:
        if name not in allowed:
            rules.properties[name] = False
    for name in allowed:
        if name not in rules.properties:
            rules.properties[name] = rules.others
    rules.others = False


def _restrict_by_pattern(names: dict[str, Json], path: str, rules: ObjectRules) -> None:
    low, high = count(names, "minLength", path) or 0, count(names, "maxLength", path)
    if "pattern" in names:
        place = child(path, "pattern")
        try:
            text = rewrite(names["pattern"]).text
            expression = re.compile(names["pattern"], re.ASCII)
        except (RegexError, re.error, TypeError) as error:
            raise SchemaError(place, str(error)) from error
        if not all(name.isascii() and name.isprintable() for name in rules.properties):
            raise SchemaError(place, "is enforced only beside properties with ASCII names")
    else:
        text = f"^(?s:.{{{low},{'' if high is None else high}}})$"
        expression = re.compile(f"\\A.{{{low},{'' if high is None else high}}}\\Z", re.DOTALL)
    for name in rules.properties:
        if expression.search(name) is None:
            rules.properties[name] = False
    if rules.others is not False:
        rules.patterns = {text: rules.others}
        rules.others = False


def _read_dependencies(node: dict[str, Json], path: str, lower: Lower, rules: ObjectRules) -> None:
    """`a requires ...` is the same as `there is no a, or ...`."""
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, needs in _members(node.get(key, {}), child(path, key)).items():
            place = child(child(path, key), name)
            listed = key == "dependentRequired" or (key == "dependencies" and isinstance(needs, list))
            consequence = {"required": _names(needs, place)} if listed else lower(needs, place)
            # The name stands first in the branch that has it, so that it is written before what it requires.
            present: Schema = {"allOf": [{"properties": {name: True}}, consequence]}
            rules.extras.append(present if name in rules.required else {"anyOf": [{"properties": {name: False}}, present]})


def _check_reachable(rules: ObjectRules, path: str) -> None:
    for name in rules.required:
        schema = rules.properties.get(name)
        if schema is False or (schema is None and rules.is_closed):
            raise SchemaError(child(path, "required"), f"{name!r} is required but not allowed: nothing satisfies both")


def _limit_members(node: dict[str, Json], path: str, rules: ObjectRules) -> None:
    """Apply `minProperties` and `maxProperties` where the number of members is certain."""
    low, high = count(node, "minProperties", path) or 0, count(node, "maxProperties", path)
    if high is not None and high < max(low, len(rules.required)):
        raise SchemaError(child(path, "maxProperties"), f"{high} is less than what is required: nothing satisfies both")
    if low > len(rules.required):
        _require_members(low, child(path, "minProperties"), rules)
    if high is not None and not (rules.is_closed and high >= len(rules.required) + len(rules.optional)):
        _bound_members(high, child(path, "maxProperties"), rules)


def _require_members(low: int, path: str, rules: ObjectRules) -> None:
    free, optional = low - len(rules.required), rules.optional
    if rules.is_closed:
        if free > len(optional):
            raise SchemaError(path, f"{low} is more than there are properties: nothing satisfies both")
        if free == len(optional):
            rules.required = rules.required + optional
        elif free == 1 and len(optional) <= MAX_ALTERNATIVES:
            rules.extras.append({"anyOf": [{"required": [name]} for name in optional]})
        else:
            raise SchemaError(path, f"is enforced for one of at most {MAX_ALTERNATIVES} optional properties, or for all")
    elif optional or free > 1:
        raise SchemaError(
            path,
            "cannot be enforced: other names may come twice, and optional properties are not counted; list them in required",
        )
    else:
        rules.counts["minProperties"] = low


def _bound_members(high: int, path: str, rules: ObjectRules) -> None:
    free, optional = high - len(rules.required), rules.optional
    if free == 0:
        for name in optional:
            rules.properties[name] = False
        for name in rules.required:
            if name not in rules.properties:
                raise SchemaError(path, f"is enforced only if {name!r}, which is required, is among the properties")
        rules.patterns, rules.others = {}, False
    elif rules.is_closed and free == 1 and len(optional) <= MAX_ALTERNATIVES:
        only = [{"properties": {other: False for other in optional if other != name}} for name in optional]
        rules.extras.append({"anyOf": only})
    elif optional or rules.is_closed:
        raise SchemaError(path, "is not enforced beside optional properties; list them in required, or leave it out")
    else:
        rules.counts["maxProperties"] = high


def _members(value: Json, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SchemaError(path, f"must be an object, not {type(value).__name__}")
    return value


def _names(value: Json, path: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SchemaError(path, "must be a list of names")
    return list(dict.fromkeys(value))
