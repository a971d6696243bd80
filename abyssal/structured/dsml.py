"""The syntax of tool calls as a grammar in Lark with embedded JSON schemas.

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="get_weather">
    <｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>
    <｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

`｜DSML｜` is one token here. Parameters come in their declared order, required ones always. Texts stand raw between the tags
and other values as JSON; a parameter that may be either has both forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import InvalidRequest
from .dialect import ANNOTATIONS
from .document import Document, Json, SchemaError, child
from .formats import FORMATS
from .precheck import CheckedSchema, check_schema
from .regex import RegexError, literal, rewrite
from .scalars import TYPES, types_of
from .spec import StructuredOutput
from .vocabulary import DSML

_PARAMETER_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties"})
_STRING_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength", "pattern", "format"})
_ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True)
class _Text:
    """A form of a value: raw text, given by a terminal in Lark."""

    terminal: str


_Form = _Text | CheckedSchema


def call_grammar(spec: StructuredOutput, dsml_id: int, json_options: dict[str, Any]) -> str:
    """The grammar of the calls, in Lark. It starts behind the first marker if text may come before, else at the opener.

    Args:
        spec: of kind `tools`, with a choice that allows calls.
        dsml_id: id of the marker.
        json_options: how the engine writes JSON.

    Raises:
        InvalidRequest: naming the function and the place in its parameters that would not be enforced.
    """
    return _Builder(dsml_id, json_options).build(spec)


class _Builder:
    """Collects the rules of one grammar."""

    def __init__(self, dsml_id: int, json_options: dict[str, Any]) -> None:
        self._marker = f"<[{dsml_id}]>"
        self._json_options = json_options
        self._rules: list[str] = []

    def build(self, spec: StructuredOutput) -> str:
        invokes = []
        for index, function in enumerate(spec.functions()):
            if spec.tool_name in (None, function["name"]):
                invokes.append(self._invoke(index, function))
        calls = f"({' | '.join(invokes)}){'+' if spec.parallel_tool_calls else ''}"
        close = f"{_quote('</')} {self._marker} {_quote(' calls>')}"
        opener = f"{_quote(' calls>' + chr(10))} "
        if spec.tools_opened:
            opener = ""
        elif spec.tool_choice != "auto":
            opener = f"{_quote(chr(10) * 2 + '<')} {self._marker} {opener}"
        return "\n".join([f"start: {opener}{calls} {close}", *self._rules])

    def _invoke(self, index: int, function: dict[str, Json]) -> str:
        """Add the rules of one function and return the name of the rule for a call of it."""
        name, path = f"f{index}", f"tools[{index}].function.parameters"
        parameters = function.get("parameters")
        try:
            members = self._parameters(
                name, path, {} if parameters is None else parameters, strict=function.get("strict") is not False
            )
        except SchemaError as error:
            raise InvalidRequest(error.path, function.get("name"), error.reason) from error
        head = (
            f"{_quote('<')} {self._marker} {_quote(' invoke name=' + chr(34) + function['name'] + chr(34) + '>' + chr(10))}"
        )
        foot = f"{_quote('</')} {self._marker} {_quote(' invoke>' + chr(10))}"
        self._rules.append(f"{name}: {head} {members} {foot}")
        return name

    def _parameters(self, rule: str, path: str, schema: Json, *, strict: bool) -> str:
        document = Document(schema, path)
        schema, path = _follow(document, schema, path)
        if not isinstance(schema, dict) or types_of(schema, path) not in (None, ("object",)):
            raise SchemaError(path, "must be the schema of an object")
        for key in schema:
            if strict and key not in _PARAMETER_KEYWORDS and key not in ANNOTATIONS and not key.startswith("x-"):
                raise SchemaError(
                    child(path, key), "is not enforced for the parameters of a function; use type, properties and required"
                )
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise SchemaError(path, "properties must be an object and required a list")
        missing = next((name for name in required if name not in properties), None)
        if missing is not None:
            raise SchemaError(child(path, "required"), f"{missing!r} is required but not among the properties")
        members = []
        for number, (name, part) in enumerate(properties.items()):
            place = child(child(path, "properties"), name)
            member = self._parameter(f"{rule}_{number}", name, part, place, document, strict=strict)
            if member is None and name in required:
                raise SchemaError(place, "is required, but nothing satisfies it")
            if member is not None:
                members.append(member if name in required else f"{member}?")
        return " ".join(members)

    def _parameter(self, rule: str, name: str, schema: Json, path: str, document: Document, *, strict: bool) -> str | None:
        """Add the rule of one parameter; None if no value satisfies its schema."""
        if not name or any(c in '"<>\\' or not c.isprintable() for c in name) or DSML in name:
            raise SchemaError(path, f"the name {name!r} cannot be written in a tag")
        if schema is False:
            return None
        try:
            forms = _forms(document, schema, path)
        except SchemaError:
            if strict:
                raise
            forms = [_Text(_ANY_TEXT), check_schema({"type": [t for t in TYPES if t != "string"]})]
        options = [self._value(f"{rule}_{i}", form) for i, form in enumerate(forms)]
        head = f"{_quote('<')} {self._marker} {_quote(' parameter name=' + chr(34) + name + chr(34) + ' string=' + chr(34))}"
        self._rules.append(f"{rule}: {head} ({' | '.join(options)}) {self._marker} {_quote(' parameter>' + chr(10))}")
        return rule

    def _value(self, rule: str, form: _Form) -> str:
        """A value with the end of its opening tag and the start of its closing tag."""
        if isinstance(form, _Text):
            # One terminal up to the marker: a text may itself hold "</", which only the marker makes a closing tag.
            self._rules.append(f"{rule.upper()}: ({form.terminal}) {_quote('</')}")
            return f"{_quote('true' + chr(34) + '>')} {rule.upper()}"
        _refuse_marker(form)
        text = json.dumps({**form.schema, "x-guidance": self._json_options}, ensure_ascii=False)
        self._rules.append(f"{rule}: %json {text}")
        return f"{_quote('false' + chr(34) + '>')} {rule} {_quote('</')}"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_marker(form: CheckedSchema) -> None:
    if DSML in form.text:
        raise SchemaError(form.paths.get(id(form.schema), "$"), f"holds {DSML}, which only tags may")


def _follow(document: Document, schema: Json, path: str) -> tuple[Json, str]:
    """What a schema that is only a reference points to."""
    seen: set[str] = set()
    while isinstance(schema, dict) and "$ref" in schema and not set(schema) - ANNOTATIONS - {"$ref"} and path not in seen:
        seen.add(path)
        path, schema = document.resolve(schema["$ref"], child(path, "$ref"))
    return schema, path


def _forms(document: Document, schema: Json, path: str) -> list[_Form]:
    """The forms of a value: texts raw, everything else as JSON.

    Raises:
        SchemaError: for what would not be enforced.
    """
    check_schema(schema, path, document)
    return _split(document, schema, path)


def _split(document: Document, schema: Json, path: str) -> list[_Form]:
    schema, path = _follow(document, schema, path)
    if schema is True:
        schema = {}
    if schema is False:
        return []
    effective = set(schema) - ANNOTATIONS
    for key in ("anyOf", "oneOf"):
        if effective == {key}:
            branches = [_split(document, part, child(child(path, key), i)) for i, part in enumerate(schema[key])]
            return [form for branch in branches for form in branch]
    types = types_of(schema, path) or TYPES
    if effective & {"$ref", "allOf", "anyOf", "oneOf"} and types != ("string",):
        return [check_schema(schema, path, document)]
    forms: list[_Form] = []
    others = [name for name in types if name != "string"]
    if "string" in types:
        forms += _text_form(schema, path)
    if others:
        rest = _without_strings(schema, others)
        if rest is not None:
            forms.append(check_schema(rest, path, document))
    return forms


def _without_strings(schema: dict[str, Json], others: Sequence[str]) -> dict[str, Json] | None:
    """The schema for values that are no strings, None if there are none."""
    rest = {**schema, "type": list(others)}
    if isinstance(rest.get("const"), str):
        return None
    if "enum" in rest:
        rest["enum"] = [value for value in rest["enum"] if not isinstance(value, str)]
        return rest if rest["enum"] else None
    return rest


def _text_form(schema: dict[str, Json], path: str) -> list[_Text]:
    """The raw form of a string; empty if the listed values hold no string."""
    for key in set(schema) & {"$ref", "allOf", "anyOf", "oneOf"}:
        raise SchemaError(child(path, key), "is not enforced beside a string in the parameters of a function")
    constants = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if constants is not None:
        return _constant_texts([value for value in constants if isinstance(value, str)], schema, path)
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    parts = [] if not low and high == "" else [f"/(?s:.{{{int(low)},{high if high == '' else int(high)}}})/"]
    if "pattern" in schema:
        parts.append(f"/(?:{_whole_text(schema['pattern'], child(path, 'pattern'))})/")
    if "format" in schema:
        known = FORMATS[schema["format"]]
        parts.append(f"/(?:{_slashes(known.pattern)})/")
        parts += [] if known.max_length is None else [f"/(?s:.{{0,{known.max_length}}})/"]
    return [_Text(" & ".join(parts) or _ANY_TEXT)]


def _constant_texts(texts: list[str], schema: dict[str, Json], path: str) -> list[_Text]:
    if set(schema) & (_STRING_KEYWORDS - {"type", "enum", "const"}):
        raise SchemaError(path, "lists its values and restricts them besides; leave out the values that do not count")
    if any(DSML in text for text in texts):
        raise SchemaError(path, f"holds {DSML}, which only tags may")
    return [_Text(f"/(?:{'|'.join(_slashes(literal(text)) for text in texts)})/")] if texts else []


def _whole_text(pattern: str, path: str) -> str:
    """An expression that is searched for, as one that matches the whole text."""
    try:
        return _slashes(rewrite(pattern, searched=True, json_text=False).text)
    except RegexError as error:
        raise SchemaError(path, f"{pattern!r}: {error}") from error


def _slashes(expression: str) -> str:
    """Escape the slashes that would end an expression in Lark."""
    return re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], expression)
