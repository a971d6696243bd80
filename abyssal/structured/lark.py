"""Checks of grammars in Lark as users write them: no markup tokens, nothing that rules out rollback, schemas pre-checked."""

from __future__ import annotations

import json
import re
from typing import Any

from .document import SchemaError
from .precheck import check_schema

_PIECES = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*")|(?P<comment>(?://|\#)[^\n]*)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/)"""
    r"""|%(?P<embedded>[a-z]+)\s*(?=\{)|(?P<token><)|(?P<option>\b(?:max_tokens|temperature|stop)\s*=)|(?P<other>@[A-Za-z_]+)"""
)


class LarkError(ValueError):
    """What a grammar may not hold, with the line."""


def check_lark(text: str, json_options: dict[str, Any]) -> str:
    """The grammar with its embedded JSON schemas replaced by checked ones.

    Args:
        text: in Lark, with the start rule `start`.
        json_options: how the engine writes JSON.

    Raises:
        LarkError: for what is not allowed.
        SchemaError: for embedded schemas that would not be enforced.
    """
    result, position = "", 0
    while match := _PIECES.search(text, position):
        result += text[position : match.start()]
        position = match.end()
        line = text.count("\n", 0, match.start()) + 1
        if match.lastgroup == "token":
            raise LarkError(f"line {line}: tokens by name or id (<...>) are markup, which no text may contain")
        if match.lastgroup == "option":
            raise LarkError(f"line {line}: {match[0].rstrip('= ')} cannot be taken back when drafts are rejected")
        if match.lastgroup == "other":
            raise LarkError(f"line {line}: {match[0]} refers to another grammar; there is only this one")
        if match.lastgroup == "embedded":
            embedded, position = _embedded(text, match, line, json_options)
            result += embedded
        else:
            result += match[0]
    return result + text[position:]


def _embedded(text: str, match: re.Match[str], line: int, json_options: dict[str, Any]) -> tuple[str, int]:
    """A directive with a JSON object behind it, checked, and where it ends."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, match.end())
    except (ValueError, RecursionError) as error:
        raise LarkError(f"line {line}: %{match['embedded']} needs a JSON object: {error}") from error
    if match["embedded"] == "json":
        try:
            checked = check_schema(value)
        except SchemaError as error:
            raise LarkError(f"line {line}: %json {error}") from error
        return f"%json {json.dumps({**checked.schema, 'x-guidance': json_options}, ensure_ascii=False)}", end
    if match["embedded"] == "llguidance" and not value:
        return "", end
    if match["embedded"] == "regex":
        return text[match.start() : end], end
    raise LarkError(f"line {line}: %{match['embedded']} is not supported")
