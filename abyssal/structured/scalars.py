"""Keywords about one value: types, constants, numbers and strings, rewritten into what the engine enforces exactly."""

from __future__ import annotations

import math
import sys
from decimal import Decimal
from typing import Any

from .dialect import Dialect
from .document import Json, SchemaError, child
from .formats import FORMATS
from .regex import RegexError, is_writable, rewrite

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_EXACT = 2**53
"""Whole numbers up to here are exact as doubles, which the engine computes bounds in."""
LARGEST_BOUND = 2**63 - 1024
"""The largest double below 2**63."""
SMALLEST_FRACTION = 1e-15
MAX_MULTIPLE_COEFFICIENT = 1_000_000
MAX_FRACTION_DIGITS = 15
MAX_COUNT = 2**31 - 1
MAX_CONSTANT_DEPTH = 16

Schema = dict[str, Any]


def types_of(node: dict[str, Json], path: str) -> tuple[str, ...] | None:
    """The types that `type` names, None where it is absent.

    Raises:
        SchemaError: for an unknown type or an empty list.
    """
    if "type" not in node:
        return None
    listed = node["type"] if isinstance(node["type"], list) else [node["type"]]
    for name in listed:
        if name not in TYPES:
            raise SchemaError(child(path, "type"), f"{name!r} is none of {', '.join(TYPES)}")
    if not listed:
        raise SchemaError(child(path, "type"), "an empty list allows nothing")
    return tuple(dict.fromkeys(listed))


def count(node: dict[str, Json], key: str, path: str) -> int | None:
    """A length or a number of members.

    Raises:
        SchemaError: unless it is a whole number from 0 to 2**31 - 1.
    """
    if key not in node:
        return None
    value = node[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_COUNT or value != int(value):
        raise SchemaError(child(path, key), f"{value!r} must be a whole number in [0, {MAX_COUNT}]")
    return int(value)


def constant(value: Json, path: str, depth: int = 0) -> Json:
    """A value of `const` or `enum` as the engine spells it exactly.

    Raises:
        SchemaError: for numbers it would round and characters it cannot write.
    """
    if depth > MAX_CONSTANT_DEPTH:
        raise SchemaError(path, f"a constant is nested more than {MAX_CONSTANT_DEPTH} deep")
    if isinstance(value, str):
        if not is_writable(value) or any(0xD800 <= ord(c) <= 0xDFFF for c in value):
            raise SchemaError(path, f"{value!r} holds a control character without a short escape, or half a surrogate pair")
        return value
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return _constant_number(value, path)
    if isinstance(value, list):
        return [constant(item, child(path, i), depth + 1) for i, item in enumerate(value)]
    return {_name(k, path): constant(v, child(path, k), depth + 1) for k, v in value.items()}


def _name(name: str, path: str) -> str:
    if any(0xD800 <= ord(c) <= 0xDFFF for c in name):
        raise SchemaError(path, f"the name {name!r} holds half of a surrogate pair")
    return name


def _constant_number(value: float, path: str) -> float:
    if abs(value) <= MAX_EXACT and value == int(value):
        return int(value)
    if isinstance(value, float) and SMALLEST_FRACTION <= abs(value) < MAX_EXACT:
        return value
    raise SchemaError(path, f"the number {value!r} would be rounded: use whole numbers up to 2**53, or fractions from 1e-15")


def numbers(node: dict[str, Json], path: str, types: tuple[str, ...] | None, dialect: Dialect) -> Schema:
    """The keywords of numbers.

    Raises:
        SchemaError: for bounds and divisors that the engine would not compute exactly.
    """
    own: Schema = {}
    whole = types is not None and "integer" in types and "number" not in types
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        value = node.get(key)
        if value is None and key not in node:
            continue
        if key.startswith("exclusive") and dialect.boolean_exclusive:
            if not isinstance(value, bool):
                raise SchemaError(child(path, key), f"{value!r} must be True or False in {dialect.name}")
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SchemaError(child(path, key), f"{value!r} must be a finite number")
        target = key
        if dialect.boolean_exclusive and node.get(f"exclusive{key.capitalize()}") is True:
            target = f"exclusive{key.capitalize()}"
        own[target] = _bound(value, target, child(path, key), whole=whole)
    if "multipleOf" in node:
        own["multipleOf"] = _divisor(node["multipleOf"], child(path, "multipleOf"))
    return own


def _bound(value: float, key: str, path: str, *, whole: bool) -> float:
    """A bound that the engine computes exactly; for whole numbers it may be a little tighter than asked for."""
    if isinstance(value, float) and value != 0 and abs(value) < SMALLEST_FRACTION:
        raise SchemaError(path, f"the bound {value!r} is nearer to 0 than {SMALLEST_FRACTION}")
    if abs(value) <= MAX_EXACT:
        return int(value) if value == int(value) else value
    is_lower = key in ("minimum", "exclusiveMinimum")
    beyond = value > LARGEST_BOUND if is_lower else value < -LARGEST_BOUND
    if not whole or beyond:
        raise SchemaError(path, f"the bound {value!r} lies beyond 2**53, where the engine would round it")
    inward = max(value, -LARGEST_BOUND) if is_lower else min(value, LARGEST_BOUND)
    rounded = float(inward)
    if is_lower and rounded < inward:
        rounded = math.nextafter(rounded, math.inf)
    if not is_lower and rounded > inward:
        rounded = math.nextafter(rounded, -math.inf)
    return int(rounded)


def _divisor(value: Json, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SchemaError(path, f"{value!r} must be a number above 0")
    digits = Decimal(repr(value)).normalize().as_tuple()
    exponent = int(digits.exponent)
    coefficient = int("".join(map(str, digits.digits))) * 10 ** max(exponent, 0)
    if coefficient > MAX_MULTIPLE_COEFFICIENT or -exponent > MAX_FRACTION_DIGITS:
        raise SchemaError(
            path, f"{value!r} has too many digits: at most {MAX_MULTIPLE_COEFFICIENT} with {MAX_FRACTION_DIGITS} decimals"
        )
    return int(value) if value == int(value) else value


def strings(node: dict[str, Json], path: str, types: tuple[str, ...] | None) -> tuple[Schema, list[Schema]]:
    """The keywords of strings: what can stand in one schema, and what has to be met besides.

    Raises:
        SchemaError: for unknown formats and for patterns that would not be enforced.
    """
    own: Schema = {}
    for key in ("minLength", "maxLength"):
        value = count(node, key, path)
        if value is not None:
            own[key] = value
    low, high = own.get("minLength", 0), own.get("maxLength", sys.maxsize)
    if low > high and types == ("string",):
        raise SchemaError(child(path, "minLength"), f"{low} is more than maxLength={high}: nothing satisfies both")
    if "pattern" in node:
        own["pattern"] = pattern_text(node["pattern"], child(path, "pattern"))
    if "format" not in node:
        return own, []
    name = node["format"]
    if not isinstance(name, str) or name not in FORMATS:
        known = ", ".join(FORMATS)
        raise SchemaError(child(path, "format"), f"{name!r} is not enforced; known are {known}; or write a pattern")
    extra: Schema = {"pattern": f"^(?:{FORMATS[name].pattern})$"}
    if FORMATS[name].max_length is not None:
        extra["maxLength"] = FORMATS[name].max_length
    return (own, [extra]) if own else (extra, [])


def pattern_text(pattern: Json, path: str) -> str:
    """A `pattern` in the engine's syntax.

    Raises:
        SchemaError: if it is no string or would not be enforced.
    """
    if not isinstance(pattern, str):
        raise SchemaError(path, f"{pattern!r} must be a string")
    try:
        return rewrite(pattern).text
    except RegexError as error:
        raise SchemaError(path, f"{pattern!r}: {error}") from error
