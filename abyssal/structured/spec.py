"""What a request wants of its output, checked on construction and comparable by content."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..core.errors import InvalidRequest
from .document import Json, dump_json, parse_json

KINDS = ("json", "json_object", "regex", "choice", "grammar", "tools")
BACKENDS = ("auto", "llguidance", "xgrammar")
MAX_WHITESPACE = 64
MAX_GRAMMAR_CHARACTERS = 1 << 18
MAX_CHOICES = 10_000

ToolChoice = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """A constraint on the output of one request. Exactly one of the first six is given.

    Attributes:
        json: a JSON schema: a dict, its text, or True for any JSON value. Kept as text.
        json_object: any JSON object.
        regex: an expression that the whole text matches.
        choice: the text is one of these.
        grammar: a grammar in Lark (rule `start`), or in GBNF/EBNF (rule `root`).
        tools: function tools in OpenAI's form; the text may hold tool calls in the syntax of the model. Kept as text.
        tool_choice: "auto" (text, then perhaps calls), "none" (text only), "required" (calls only), or OpenAI's
            `{"type": "function", "function": {"name": ...}}`, kept as "named".
        tool_name: the function that "named" names.
        parallel_tool_calls: more than one call is allowed.
        tools_opened: the prompt ends in the line that opens the calls.
        thinking: the prompt ends in `<think>`: the constraint begins behind `</think>`.
        max_whitespace: characters of whitespace in a row between the elements of JSON, 0 for compact JSON.
        backend: which library enforces it.

    Raises:
        InvalidRequest: naming the parameter, the value and what is expected.
    """

    json: Mapping[str, Json] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    tools: Sequence[Mapping[str, Json]] | str | None = None
    tool_choice: str | Mapping[str, Json] = "auto"
    tool_name: str | None = field(default=None, init=False)
    parallel_tool_calls: bool = True
    tools_opened: bool = False
    thinking: bool = False
    max_whitespace: int = 2
    backend: Literal["auto", "llguidance", "xgrammar"] = "auto"

    def __post_init__(self) -> None:
        for name in ("json_object", "parallel_tool_calls", "tools_opened", "thinking"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, getattr(self, name), "must be True or False")
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if self.json is False:
            raise InvalidRequest("json", False, "allows no value; give a schema, or True for any value")
        if len(given) != 1:
            raise InvalidRequest("structured", given, f"must have exactly one of {', '.join(KINDS)}")
        whitespace = self.max_whitespace
        if isinstance(whitespace, bool) or not isinstance(whitespace, int) or not 0 <= whitespace <= MAX_WHITESPACE:
            raise InvalidRequest("max_whitespace", whitespace, f"must be an integer in [0, {MAX_WHITESPACE}]")
        if self.backend not in BACKENDS:
            raise InvalidRequest("backend", self.backend, f"must be one of {', '.join(BACKENDS)}")
        getattr(self, f"_check_{given[0]}")()
        if given[0] != "tools" and (self.tool_choice != "auto" or self.tools_opened):
            raise InvalidRequest("tool_choice", self.tool_choice, "has no meaning without tools")

    @property
    def kind(self) -> str:
        """Which of `KINDS` is given."""
        return next(name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False)

    @property
    def key(self) -> str:
        """Hash of everything that decides what is allowed."""
        content = repr([(f.name, getattr(self, f.name)) for f in fields(self)])
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def after_reasoning(self, thinking: bool) -> StructuredOutput:
        """The same constraint for a prompt that ends in `<think>`, or for one that does not."""
        if thinking == self.thinking:
            return self
        if thinking and self.tools_opened:
            raise InvalidRequest("tools_opened", True, "cannot follow a prompt that ends in <think>")
        other = copy.copy(self)
        object.__setattr__(other, "thinking", thinking)
        return other

    def schema(self) -> Json:
        """The parsed JSON schema of the kinds `json` and `json_object`."""
        return {"type": "object"} if self.json_object else parse_json("json", str(self.json))

    def functions(self) -> list[dict[str, Any]]:
        """The parsed functions of `tools`."""
        parsed: list[dict[str, Any]] = [tool["function"] for tool in parse_json("tools", str(self.tools))]
        return parsed

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_json(self) -> None:
        value = self.json
        if isinstance(value, str):
            parsed = parse_json("json", value)
            if not isinstance(parsed, dict | bool):
                raise InvalidRequest("json", value, "must be a JSON schema: an object or true")
            value = parsed
        if not isinstance(value, Mapping | bool) or value is False:
            raise InvalidRequest("json", value, "must be a JSON schema as a dict or text, or True for any value")
        self._set("json", dump_json("json", dict(value) if isinstance(value, Mapping) else value))

    def _check_json_object(self) -> None:
        pass

    def _check_regex(self) -> None:
        self._check_text("regex")

    def _check_grammar(self) -> None:
        self._check_text("grammar")

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or not value.strip():
            raise InvalidRequest(name, value, "must be a string that is not blank")
        if "\0" in value:
            raise InvalidRequest(name, value, "must not hold a NUL character")
        if len(value) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(name, value, f"has {len(value)} characters; the limit is {MAX_GRAMMAR_CHARACTERS}")

    def _check_choice(self) -> None:
        value = self.choice
        strings = isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(c, str) and c for c in value)
        if not isinstance(value, Sequence) or not strings or not value:
            raise InvalidRequest("choice", value, "must be a list, not empty, of strings that are not empty")
        if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                "choice", value, f"has {len(value)} texts; the limits are {MAX_CHOICES} and 2**18 characters"
            )
        if any(0xD800 <= ord(char) <= 0xDFFF for text in value for char in text):
            raise InvalidRequest("choice", value, "holds half of a surrogate pair")
        self._set("choice", tuple(dict.fromkeys(value)))

    def _check_tools(self) -> None:
        value = parse_json("tools", self.tools) if isinstance(self.tools, str) else self.tools
        if not isinstance(value, Sequence) or not value:
            raise InvalidRequest("tools", value, "must be a list, not empty, of function tools")
        names = [_tool_name(tool, i) for i, tool in enumerate(value)]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools", names, "must not name a function twice")
        self._set("tools", dump_json("tools", list(value)))
        choice = self.tool_choice
        if isinstance(choice, Mapping):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if choice.get("type") != "function" or name not in names:
                raise InvalidRequest("tool_choice", choice, f"must name one of the functions {', '.join(names)}")
            self._set("tool_choice", "named")
            self._set("tool_name", name)
        elif choice not in ("auto", "none", "required"):
            raise InvalidRequest("tool_choice", choice, "must be auto, none, required, or name a function in OpenAI's form")
        if self.tools_opened and (self.thinking or self.tool_choice not in ("required", "named")):
            raise InvalidRequest("tools_opened", True, "needs tool_choice required or a named function, and no thinking")


def _tool_name(tool: Json, index: int) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(
            f"tools[{index}]", tool, 'must be {"type": "function", "function": {"name": ..., "parameters": ...}}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not name or not all(c.isascii() and (c.isalnum() or c in "_-") for c in name):
        raise InvalidRequest(f"tools[{index}].function.name", name, "must be letters, digits, _ and -")
    return name


def from_response_format(response_format: Mapping[str, Json] | None, *, thinking: bool = False) -> StructuredOutput | None:
    """The constraint that OpenAI's `response_format` stands for; None for text.

    Raises:
        InvalidRequest: for another type, or a schema that is missing.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True, thinking=thinking)
    outer = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(outer, Mapping) or not isinstance(outer.get("schema"), Mapping):
        raise InvalidRequest(
            "response_format",
            response_format,
            'type must be text, json_object, or json_schema with {"json_schema": {"schema": ...}}',
        )
    return StructuredOutput(json=outer["schema"], thinking=thinking)
