"""Grammars in GBNF (the EBNF of llama.cpp) translated to Lark.

A grammar without recursion becomes one regular expression, which is exact. In a recursive one, rules without recursion
become terminals, which match as much as they can, as in every Lark grammar.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from .regex import MAX_POSITIONS, RegexError, literal, rewrite

MAX_EXPRESSION = 100_000
"""Characters of a regular expression put together from rules."""
MAX_NESTING = 100

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_SPACE_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_RULE = re.compile(r"([A-Za-z0-9_-]+)[ \t]*::=")
_COUNTS = re.compile(r"\{\s*([0-9]+)\s*(,\s*([0-9]*)\s*)?\}")
_ESCAPES = {"n": 10, "r": 13, "t": 9, "\\": 92, '"': 34, "[": 91, "]": 93, "-": 45, "^": 94, "/": 47}
_HEX = {"x": 2, "u": 4, "U": 8}


class GbnfError(ValueError):
    """Why a grammar cannot be read, with the line."""


@dataclass(frozen=True)
class _Terminal:
    """A regular expression in the engine's syntax, which binds as one piece."""

    expression: str


@dataclass(frozen=True)
class _Reference:
    name: str


@dataclass(frozen=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True)
class _Choice:
    parts: tuple[_Node, ...]


@dataclass(frozen=True)
class _Repeat:
    part: _Node
    times: str


_Node: TypeAlias = "_Terminal | _Reference | _Sequence | _Choice | _Repeat"


def gbnf_to_lark(text: str) -> str:
    """Translate a grammar whose start rule is `root`.

    Raises:
        GbnfError: for text that is no GBNF, and for rules that are missing or defined twice.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GbnfError("there is no rule named root")
    for name, node in rules.items():
        for used in _references(node):
            if used not in rules:
                raise GbnfError(f"the rule {used} is used in {name} but not defined")
    expressions: dict[str, str | None] = {}
    whole = _expression(_Reference("root"), rules, expressions, ())
    if whole is not None:
        return f"start: /{whole}/"
    lines = ["start: r_root"]
    names = {name: f"r_{index}" if name != "root" else "r_root" for index, name in enumerate(rules)}
    for name, node in rules.items():
        lines.append(f"{names[name]}: {_lark(node, rules, expressions, names)}")
    return "\n".join(lines)


def _references(node: _Node) -> set[str]:
    if isinstance(node, _Reference):
        return {node.name}
    parts = node.parts if isinstance(node, _Sequence | _Choice) else (node.part,) if isinstance(node, _Repeat) else ()
    return set().union(*map(_references, parts))


def _expression(
    node: _Node, rules: dict[str, _Node], known: dict[str, str | None], open_rules: tuple[str, ...]
) -> str | None:
    """One regular expression for a part; None if it is recursive or grows too large."""
    if isinstance(node, _Terminal):
        return node.expression
    if isinstance(node, _Reference):
        if node.name in open_rules or len(open_rules) > MAX_NESTING:
            return None
        if node.name not in known:
            known[node.name] = _expression(rules[node.name], rules, known, (*open_rules, node.name))
        return known[node.name]
    if isinstance(node, _Repeat):
        inner = _expression(node.part, rules, known, open_rules)
        return None if inner is None else f"(?:{inner}){node.times}"
    parts = [_expression(part, rules, known, open_rules) for part in node.parts]
    if any(part is None for part in parts):
        return None
    joined = ("|" if isinstance(node, _Choice) else "").join(part for part in parts if part is not None)
    return f"(?:{joined})" if len(joined) <= MAX_EXPRESSION else None


def _lark(node: _Node, rules: dict[str, _Node], known: dict[str, str | None], names: dict[str, str]) -> str:
    """A part of a recursive grammar, with an expression wherever there is one."""
    expression = _expression(node, rules, known, ())
    if expression is not None:
        return f"/{expression}/" if expression not in ("", "(?:)") else '""'
    if isinstance(node, _Reference):
        return names[node.name]
    if isinstance(node, _Repeat):
        return f"({_lark(node.part, rules, known, names)}){node.times}"
    assert isinstance(node, _Sequence | _Choice), "a terminal is an expression"
    return f"({(' | ' if isinstance(node, _Choice) else ' ').join(_lark(part, rules, known, names) for part in node.parts)})"


class _Parser:
    """Recursive descent over a grammar's text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def _error(self, reason: str) -> GbnfError:
        return GbnfError(f"{reason} (line {self._text.count(chr(10), 0, self._position) + 1})")

    def _skip(self, space: re.Pattern[str]) -> None:
        match = space.match(self._text, self._position)
        self._position = match.end() if match else self._position

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        self._skip(_SPACE_LINES)
        while self._position < len(self._text):
            match = _RULE.match(self._text, self._position)
            if match is None:
                raise self._error("expected a rule: name ::= ...")
            if match[1] in rules:
                raise self._error(f"the rule {match[1]} is defined twice")
            self._position = match.end()
            self._skip(_SPACE_LINES)
            rules[match[1]] = self._choice(0)
            self._skip(_SPACE_LINES)
        return rules

    def _choice(self, depth: int) -> _Node:
        if depth > MAX_NESTING:
            raise self._error(f"groups are nested more than {MAX_NESTING} deep")
        options = [self._sequence(depth)]
        while True:
            before = self._position
            self._skip(_SPACE_LINES)
            if not self._text.startswith("|", self._position):
                self._position = self._position if depth else before
                return options[0] if len(options) == 1 else _Choice(tuple(options))
            self._position += 1
            self._skip(_SPACE_LINES)
            options.append(self._sequence(depth))

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while True:
            self._skip(_SPACE_LINES if depth else _SPACE)
            if _RULE.match(self._text, self._position):
                return _Sequence(tuple(parts))
            part = self._atom(depth)
            if part is None:
                return _Sequence(tuple(parts))
            self._skip(_SPACE)
            parts.append(self._repeated(part))

    def _atom(self, depth: int) -> _Node | None:
        char = self._text[self._position : self._position + 1]
        if char in ("", "|", ")", "\n", "\r"):
            return None
        if char == '"':
            self._position += 1
            return _Terminal(f"(?:{literal(''.join(map(chr, self._codes(chr(34)))))})")
        if char == "[":
            return _Terminal(self._class())
        if char == ".":
            self._position += 1
            return _Terminal("(?s:.)")
        if char == "(":
            self._position += 1
            inner = self._choice(depth + 1)
            if not self._text.startswith(")", self._position):
                raise self._error("a group is not closed")
            self._position += 1
            return inner
        match = _NAME.match(self._text, self._position)
        if match is None:
            raise self._error(f"unexpected {char!r}")
        self._position = match.end()
        return _Reference(match[0])

    def _repeated(self, part: _Node) -> _Node:
        for sign, times in (("*", "{0,}"), ("+", "{1,}"), ("?", "{0,1}")):
            if self._text.startswith(sign, self._position):
                self._position += 1
                return _Repeat(part, times)
        match = _COUNTS.match(self._text, self._position)
        if match is None:
            return part
        low = int(match[1])
        high = low if match[2] is None else int(match[3]) if match[3] else None
        if max(low, high or 0) > MAX_POSITIONS or (high is not None and high < low):
            raise self._error(f"the repetition {match[0]} is empty or exceeds {MAX_POSITIONS}")
        self._position = match.end()
        return _Repeat(part, f"{{{low},{'' if high is None else high}}}")

    def _codes(self, end: str) -> list[int]:
        """Characters up to a closing quote."""
        codes: list[int] = []
        while not self._text.startswith(end, self._position):
            codes.append(self._character())
        self._position += 1
        return codes

    def _character(self) -> int:
        if self._position >= len(self._text):
            raise self._error("the grammar ends inside of quotes or brackets")
        char = self._text[self._position]
        self._position += 1
        if char != "\\":
            return ord(char)
        kind = self._text[self._position : self._position + 1]
        self._position += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        digits = self._text[self._position : self._position + _HEX.get(kind, 0)]
        if kind not in _HEX or not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[kind]}}}", digits) or int(digits, 16) > 0x10FFFF:
            raise self._error(f"the escape \\{kind} is not known")
        self._position += _HEX[kind]
        return int(digits, 16)

    def _class(self) -> str:
        """A class, spelled so that the rewriting of expressions reads it."""
        self._position += 1
        spelled = "["
        if self._text.startswith("^", self._position):
            self._position += 1
            spelled += "^"
        while not self._text.startswith("]", self._position):
            first = self._character()
            spelled += f"\\u{{{first:X}}}"
            if self._text.startswith("-", self._position) and not self._text.startswith("-]", self._position):
                self._position += 1
                spelled += f"-\\u{{{self._character():X}}}"
        self._position += 1
        try:
            return rewrite(f"{spelled}]", anchors=False, json_text=False).text
        except RegexError as error:
            raise self._error(str(error)) from error
