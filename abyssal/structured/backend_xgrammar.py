"""Grammars compiled and walked by xgrammar, an extra.

xgrammar ignores or misreads parts of JSON Schema without saying so. Schemas for it are limited to what it was found to
enforce exactly; everything else is refused here, and `backend="auto"` enforces it.
"""

from __future__ import annotations

import re
from typing import Any

import xgrammar

from ..core.errors import InvalidRequest
from .document import SchemaError, child
from .grammar import Backend, EngineMatcher
from .mask import Mask
from .precheck import check_schema
from .regex import RegexError, literal, rewrite
from .spec import StructuredOutput
from .vocabulary import Vocabulary

_HINT = "is not enforced by xgrammar; use backend='auto'"
_UNREADABLE = re.compile(r"\(\?s|\\x\{|\\p|\\P|\[[^\]]*\[")
"""Syntax of expressions that xgrammar reads differently or not at all."""
_HALF_PAIR = re.compile(rb"\xED(?:[\xA0-\xBF]|\Z)")
_ENFORCED: dict[str, set[str]] = {
    "null": set(),
    "boolean": set(),
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "string": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


class XGrammarMatcher(EngineMatcher):
    """A sequence in one grammar."""

    def __init__(self, native: Any, text_ids: frozenset[int]) -> None:
        self._native = native
        self._text_ids = text_ids

    def accept(self, token_id: int) -> bool:
        return token_id in self._text_ids and bool(self._native.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._native.rollback(num_tokens)

    def fork(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._native.fork(), self._text_ids)

    def fill(self, row: Mask) -> None:
        row[:] = -1
        self._native.fill_next_token_bitmask(row[None])

    def forced_tokens(self) -> list[int]:
        return []

    @property
    def is_accepting(self) -> bool:
        return bool(self._native.is_completed())

    @property
    def is_stopped(self) -> bool:
        """Not known here: a stop id is then simply the only token allowed."""
        return False

    @property
    def error(self) -> str | None:
        return None


class XGrammarBackend(Backend):
    """Compiles JSON schemas, expressions, choices and GBNF for one vocabulary, in which markup stands for no text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._eos_id = min(vocabulary.eos_ids)
        texts = [_text(vocabulary, i) for i in range(vocabulary.tokenizer.vocab_size)]
        self._text_ids = frozenset(i for i, text in enumerate(texts) if text)
        info = xgrammar.TokenizerInfo(
            texts, xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=[self._eos_id], add_prefix_space=False
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    @property
    def eos_id(self) -> int:
        return self._eos_id

    @classmethod
    def check(cls, spec: StructuredOutput, dsml_id: int | None) -> None:
        _source(spec)

    def compile(self, spec: StructuredOutput) -> tuple[EngineMatcher, int]:
        try:
            compiled = self._compile(spec, _source(spec))
        except RuntimeError as error:
            raise InvalidRequest(spec.kind, getattr(spec, spec.kind), str(error).split("\n", 1)[0]) from error
        return XGrammarMatcher(xgrammar.GrammarMatcher(compiled), self._text_ids), int(compiled.memory_size_bytes)

    def _compile(self, spec: StructuredOutput, source: str) -> Any:
        if spec.kind in ("json", "json_object"):
            compact = spec.max_whitespace == 0
            return self._compiler.compile_json_schema(
                source,
                any_whitespace=not compact,
                separators=(",", ":") if compact else None,
                strict_mode=False,
                max_whitespace_cnt=None if compact else spec.max_whitespace,
            )
        if spec.kind == "grammar":
            return self._compiler.compile_grammar(source)
        return self._compiler.compile_regex(source)


def _source(spec: StructuredOutput) -> str:
    """The schema, expression or grammar in the library's words.

    Raises:
        InvalidRequest: for what would not be enforced.
    """
    try:
        if spec.kind in ("json", "json_object"):
            checked = check_schema(spec.schema())
            _check(checked.schema, "$", checked.paths)
            return checked.text
        if spec.kind == "choice":
            return "|".join(_readable(literal(text)) for text in spec.choice or ())
        if spec.kind == "regex":
            return _readable(rewrite(str(spec.regex), anchors=False, json_text=False).text)
    except (SchemaError, RegexError) as error:
        raise InvalidRequest(spec.kind, getattr(spec, spec.kind), str(error)) from error
    if spec.kind == "grammar" and "::=" in str(spec.grammar):
        return str(spec.grammar)
    raise InvalidRequest("backend", spec.backend, f"{spec.kind} of this kind {_HINT}")


def _text(vocabulary: Vocabulary, token_id: int) -> bytes:
    """What a token may stand for: markup for nothing, and nothing that could become half of a surrogate pair in UTF-8."""
    text = vocabulary.tokenizer.token_bytes(token_id) if token_id in vocabulary.text_ids else b""
    return b"" if _HALF_PAIR.search(text) else text


def _readable(expression: str) -> str:
    if _UNREADABLE.search(expression):
        raise RegexError(f"{expression!r} {_HINT}")
    return expression


def _check(schema: Any, path: str, paths: dict[int, str]) -> None:
    """Refuse what xgrammar was not found to enforce."""
    if isinstance(schema, bool):
        return
    path = paths.get(id(schema), path)
    keys = set(schema) - {"$defs"}
    for name, part in schema.get("$defs", {}).items():
        _check(part, f"$defs.{name}", paths)
    if keys <= {"$ref"} or keys == {"enum"}:
        return
    if keys == {"anyOf"}:
        for part in schema["anyOf"]:
            _check(part, path, paths)
        return
    kind = schema.get("type")
    if isinstance(kind, list) and keys == {"type"}:
        return
    rest = keys - {"type"}
    unknown = rest - _ENFORCED[kind] if isinstance(kind, str) else rest
    if unknown or not isinstance(kind, str):
        raise SchemaError(child(path, min(unknown, default="type")), _HINT)
    if not set(schema.get("required", ())) <= set(schema.get("properties", ())):
        raise SchemaError(child(path, "required"), f"of a name that is not among the properties {_HINT}")
    for part in (
        schema.get("items", True),
        schema.get("additionalProperties", True),
        *schema.get("properties", {}).values(),
    ):
        _check(part, path, paths)
