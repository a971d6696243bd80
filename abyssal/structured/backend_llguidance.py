"""Grammars compiled and walked by llguidance, the default backend."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from ..core.errors import InvalidRequest
from .document import SchemaError
from .dsml import call_grammar
from .gbnf import GbnfError, gbnf_to_lark
from .grammar import Backend, EngineMatcher, Segment
from .lark import LarkError, check_lark
from .locate import locate
from .mask import Mask
from .precheck import CheckedSchema, check_schema
from .regex import RegexError, literal, rewrite
from .spec import StructuredOutput
from .vocabulary import Vocabulary

ESCAPES = 'nrbtf\\"'
"""Escapes in JSON strings. Without `\\u`, no name can be spelled in a second way and slip past the rules for the first."""

_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(_STRING + f"{{1,{n}}}" for n in (5, 10, 20)), _STRING + "+"]
"""Parts of the vocabulary that are allowed or not as a whole inside strings, the shorter ones where lengths are limited."""

COPIES_PER_THREAD = 4
"""How finely the sequences of one grammar can be split among threads without waiting for each other."""

BASE_BYTES = 64 << 10
BYTES_PER_CHARACTER = 64
"""What a compiled grammar takes: measured, and rounded up."""


def json_options(max_whitespace: int) -> dict[str, Any]:
    """How JSON is written: with at most that many characters of whitespace in a row between elements."""
    options: dict[str, Any] = {"coerce_one_of": False, "lenient": False, "json_allowed_escapes": ESCAPES}
    if max_whitespace == 0:
        return options | {"whitespace_flexible": False}
    return options | {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{max_whitespace}}}"}


class LLGuidanceMatcher(EngineMatcher):
    """A sequence in one grammar. Refused tokens leave the library's matcher as it was.

    Attributes:
        family: the same for forks of one matcher. They share state behind a lock.
    """

    def __init__(self, matcher: llguidance.LLMatcher, family: int) -> None:
        self.native, self.family = matcher, family

    def accept(self, token_id: int) -> bool:
        return bool(self.native.try_consume_tokens([token_id]) == 1)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self.native.rollback(num_tokens):
            raise AssertionError(f"cannot roll back {num_tokens} tokens: {self.native.get_error()}")

    def fork(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self.native.deep_copy(), self.family)

    def fill(self, row: Mask) -> None:
        assert row.flags["C_CONTIGUOUS"], "a mask row must be contiguous"
        if not self.native.is_error():
            self.native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def forced_tokens(self) -> list[int]:
        return [] if self.native.is_error() or self.native.is_stopped() else list(self.native.compute_ff_tokens())

    @property
    def is_accepting(self) -> bool:
        return bool(self.native.is_accepting())

    @property
    def is_stopped(self) -> bool:
        return bool(self.native.is_stopped())

    @property
    def error(self) -> str | None:
        if not self.native.is_error():
            return None
        return first_line(self.native.get_error())


class LLGuidanceBackend(Backend):
    """Compiles for one vocabulary; fills rows with the threads it is given."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int = 1) -> None:
        """Build the library's view of the vocabulary, in which all added tokens are markup."""
        self.vocabulary = vocabulary
        self._eos_id = min(vocabulary.eos_ids)
        self._tokenizer = llguidance.LLTokenizer(
            _without_spelled_markup(vocabulary.tokenizer.json_text),
            n_vocab=vocabulary.size,
            eos_token=self._eos_id,
            slices=SLICES,
        )
        missing = [i for i in vocabulary.control_ids if not self._tokenizer.is_special_token(i)]
        assert not missing, f"the library takes {missing[:5]} for text"
        self._executor = llguidance.LLExecutor(num_threads)
        self.num_copies = COPIES_PER_THREAD * num_threads
        self._families = itertools.count()
        self._limits = llguidance.LLParserLimits(max_items_in_row=10_000, verbose_errors=False)

    @property
    def eos_id(self) -> int:
        return self._eos_id

    @classmethod
    def check(cls, spec: StructuredOutput, dsml_id: int | None) -> None:
        _source(spec, dsml_id)

    def compile(self, spec: StructuredOutput) -> tuple[EngineMatcher, int]:
        source, schema = _source(spec, self.vocabulary.dsml_id)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            row = np.empty((self.vocabulary.size + 31) // 32, dtype=np.int32)
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            reason = first_line(matcher.get_error())
            if schema is not None:
                place, reason = locate(schema, reason, lambda text: self._why_refused(text, spec))
                reason = f"{place}: {reason}"
            raise InvalidRequest(spec.kind, getattr(spec, spec.kind), reason)
        return LLGuidanceMatcher(matcher, next(self._families)), BASE_BYTES + BYTES_PER_CHARACTER * len(source)

    def fill(self, segments: Sequence[Segment], masks: Mask) -> None:
        assert masks.flags["C_CONTIGUOUS"], "masks must be contiguous"
        plain: list[tuple[llguidance.LLMatcher, int]] = []
        drafted: list[tuple[llguidance.LLMatcher, int, list[int]]] = []
        # families apart from each other: the executor hands out stretches of the list, and a thread should meet no lock
        for segment in sorted(segments, key=_family):
            engine = _of(segment)
            if engine.native.is_error():
                continue
            if segment.drafts:
                drafted.append((engine.native, segment.first_row, list(segment.drafts)))
            else:
                plain.append((engine.native, segment.first_row))
        address, row_bytes, num_rows = masks.ctypes.data, masks.shape[1] * 4, masks.shape[0]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, address, row_bytes, num_rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, address, row_bytes, num_rows)

    def _why_refused(self, schema_text: str, spec: StructuredOutput) -> str | None:
        source = _json_grammar(schema_text, json_options(spec.max_whitespace))
        message = llguidance.LLMatcher.validate_grammar(source, self._tokenizer, limits=self._limits)
        return first_line(message) if message else None


def _of(segment: Segment) -> LLGuidanceMatcher:
    assert isinstance(segment.engine, LLGuidanceMatcher), "a matcher of another backend"
    return segment.engine


def _family(segment: Segment) -> int:
    return _of(segment).family


def _source(spec: StructuredOutput, dsml_id: int | None) -> tuple[str, CheckedSchema | None]:
    """The grammar in the library's words, and the schema it comes from.

    Raises:
        InvalidRequest: for what would not be enforced.
    """
    options = json_options(spec.max_whitespace)
    try:
        if spec.kind in ("json", "json_object"):
            checked = check_schema(spec.schema())
            return _json_grammar(checked.text, options), checked
        if spec.kind == "choice":
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(literal, spec.choice or ()))), None
        if spec.kind == "regex":
            expression = rewrite(str(spec.regex), anchors=False, json_text=False).text
            return llguidance.LLMatcher.grammar_from_regex(expression), None
        if spec.kind == "grammar":
            text = str(spec.grammar)
            lark = gbnf_to_lark(text) if "::=" in text else check_lark(text, options)
            return llguidance.LLMatcher.grammar_from_lark(lark), None
    except (SchemaError, RegexError, GbnfError, LarkError) as error:
        raise InvalidRequest(spec.kind, getattr(spec, spec.kind), str(error)) from error
    if dsml_id is None:
        raise InvalidRequest("tools", spec.tool_choice, "the tokenizer has no marker for tool calls")
    return llguidance.LLMatcher.grammar_from_lark(call_grammar(spec, dsml_id, options)), None


def _without_spelled_markup(tokenizer_json: str) -> str:
    """A `tokenizer.json` in which all added tokens are special and no text spells one.

    The library tokenizes text that is certain to come, such as the names of required properties. Were such a text
    `<think>`, it would come out as the markup token, which is not allowed there.
    """
    content = json.loads(tokenizer_json)
    names = {token["content"]: f"\U0010ffff{token['id']}\U0010ffff" for token in content.get("added_tokens", [])}
    content["added_tokens"] = [
        {**token, "content": names[token["content"]], "special": True} for token in content.get("added_tokens", [])
    ]
    content["model"]["vocab"] = {names.get(text, text): token_id for text, token_id in content["model"]["vocab"].items()}
    return json.dumps(content, ensure_ascii=False)


def _json_grammar(schema_text: str, options: Any) -> str:
    return str(llguidance.LLMatcher.grammar_from_json_schema(schema_text, overrides=options))


def first_line(message: str) -> str:
    """The part of the library's message that is about the grammar."""
    lines = [line.strip() for line in message.split("\n<", 1)[0].strip().split("\n")]
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    return "; ".join([lines[0], *reasons]) or "the grammar library gave no reason"
