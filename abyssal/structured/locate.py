"""Finds the part of a schema that the library refuses, for the few refusals that the pre-check does not foresee."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from .precheck import CheckedSchema

MAX_TRIALS = 200
_KEYWORDS = {"patternProperty": ".patternProperties", "min/maxProperties": ".minProperties or .maxProperties"}


def locate(checked: CheckedSchema, reason: str, why_refused: Callable[[str], str | None]) -> tuple[str, str]:
    """Place and reason of a refusal: the deepest part that is refused alone, for the same kind of reason.

    Args:
        checked: the schema as a whole.
        reason: why it was refused.
        why_refused: reason for which the library refuses a schema given as text, or None.
    """
    definitions = checked.schema.get("$defs", {})
    place = checked.paths.get(id(checked.schema), "$")
    trials = 0
    pending = [*_parts(checked.schema), *(part for part in definitions.values() if isinstance(part, dict))]
    while pending and trials < MAX_TRIALS:
        part = pending.pop(0)
        trials += 1
        found = why_refused(json.dumps({**part, "$defs": definitions} if definitions else part, ensure_ascii=False))
        if found is None or _kind(found) != _kind(reason):
            continue
        place, reason = checked.paths.get(id(part), place), found
        pending = list(_parts(part))
    keyword = next((key for start, key in _KEYWORDS.items() if reason.startswith(start)), "")
    return place + keyword, reason


def _kind(reason: str) -> str:
    return reason.split(":", 1)[0].split(" ", 1)[0]


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("allOf", "anyOf", "prefixItems"):
        yield from (part for part in schema.get(key, ()) if isinstance(part, dict))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield schema[key]
    for key in ("properties", "patternProperties"):
        yield from (part for part in schema.get(key, {}).values() if isinstance(part, dict))
