"""Random schemas over all keywords, a random model to write under them, and independent checks of what it wrote.

Used by the corpus test and by `benchmarks/structured_corpus.py`. Everything follows from seeds.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import json
import random
import re
import tempfile
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from abyssal.core.errors import InvalidRequest
from abyssal.structured.compiler import GrammarCompiler
from abyssal.structured.grammar import GrammarError
from abyssal.structured.mask import allocate, allowed_ids
from abyssal.structured.matcher import Matcher
from abyssal.structured.spec import StructuredOutput
from abyssal.structured.vocabulary import Vocabulary
from abyssal.text.tokenizer import Tokenizer

FREE_TOKENS = 64
MAX_TOKENS = 600
PADDED_ROWS = 23
MARKUP = ("<bos>", "<eos>", "<pad>", "<think>", "</think>", "｜DSML｜", "<end>")
EOS_ID, THINK_END_ID, DSML_ID, SECOND_EOS_ID = 1, 4, 5, 6

decimal.getcontext().prec = 2000

NAMES = ["a", "b", "ab", "x-1", "n", "é", 'q"r', "x/y"]
NAME_PATTERNS = ["^a", "b$", "^[ab]+$", "[0-9]", "^x-", "^(a|n)$", "^[^a-z]"]
TEXT_PATTERNS = [
    "^a+$", "^[a-c]{2,4}$", "b", "^\\d{3}$", "^\\w+$", "^(x|yz)+$", "^[^b]*$", "^.{2,3}$", "a|^b", "^\\s?\\S+$", "^\\W$",
    "[^\\w]$", "^$", "é", "^\\D+$", "[\\s\\S]{1,3}$", "^[\\w.-]+@x\\.(com|de)$", "\\u0041", "(?:ab)?c+?$",
]  # fmt: skip
REFUSED_PATTERNS = ["(?=a)b", "(a)\\1", "\\ba", "(?i)a", "a^b", "(a{1,400}){1,400}", "[", "a**", "\\x01", "(?<!a)b"]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "json-pointer"]
DRAFTS = [
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]


def write_tokenizer(path: Path) -> None:
    """A byte-level BPE of some 600 ids that knows the pieces JSON is made of."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        '{"a": 1, "b": [1, 2, 3], "ab": {"n": true}}', '{"x-1":null,"name":"yes","n":-3.75e10,"q":"a\\n\\"\\u0041"}',
        '[{"a":"2024-02-29T12:00:00Z"},[],{}]', '"},"', '"],["', '":{"', '":["', "null,true,false", "aaa bbb yes é 模型",
        '"email":"a@b.co","192.168.0.1"', "  \n  \n\t", '": "', '", "', '"}}', '"]}', "https://a.b",
        "<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"f\">\n", ' string="true">', "</｜DSML｜ parameter>\n", "\n\n<",
    ]  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in MARKUP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 4, trainer)
    tokenizer.save(str(path))


def make_vocabulary() -> Vocabulary:
    """The small vocabulary, for a model with some more rows than there are tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        write_tokenizer(path)
        tokenizer = Tokenizer(path)
    return Vocabulary.of(tokenizer, tokenizer.vocab_size + PADDED_ROWS, [EOS_ID, SECOND_EOS_ID])


class SchemaGenerator:
    """One random schema for each seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.draft = self.random.choice(DRAFTS) if self.random.random() < 0.25 else None

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def document(self) -> Any:
        """A root schema, with definitions if it refers to some."""
        schema = self.schema(0)
        if not isinstance(schema, dict):
            return schema
        if "$ref" in json.dumps(schema):
            schema["$defs" if self.draft is None or "2020" in self.draft else "definitions"] = {
                "d0": self.schema(1),
                "d1": self.schema(2),
                "x/y": {"type": "integer"},
            }
        return schema if self.draft is None else {"$schema": self.draft, **schema}

    def schema(self, depth: int) -> Any:
        if self.chance(0.03):
            return self.random.choice([True, False, {}])
        schema = self._base(depth)
        if self.chance(0.12):
            self._add_applicator(schema, depth)
        if self.chance(0.1):
            schema[self.random.choice(["description", "title", "$comment", "x-note"])] = "d"
        if self.chance(0.01):
            schema[self.random.choice(["nullable", "minimun", "x-guidance", "$dynamicRef"])] = True
        items = list(schema.items())
        if self.chance(0.3):
            self.random.shuffle(items)
        return dict(items)

    def _base(self, depth: int) -> dict[str, Any]:
        pick = self.random.random()
        deep = depth >= 3
        types = TYPES[:5] if deep else TYPES
        if pick < 0.62 or deep:
            name = self.random.choice(types)
            return {"type": name, **self._keywords([name], depth)}
        if pick < 0.70:
            names = self.random.sample(types, self.random.randrange(1, 4))
            return {"type": names, **self._keywords(names, depth)}
        if pick < 0.76:
            return self._keywords(self.random.sample(TYPES, 2), depth)
        if pick < 0.82:
            return {"enum": [self.value() for _ in range(self.random.randrange(1, 4))]}
        if pick < 0.85:
            return {"const": self.value()}
        if pick < 0.97:
            return {self.random.choice(["anyOf", "anyOf", "oneOf", "allOf"]): self._several(depth)}
        return {"$ref": self._reference()}

    def _several(self, depth: int) -> list[Any]:
        if self.chance(0.15):  # a tagged union
            return [
                {"type": "object", "properties": {"n": {"const": tag}, "a": self.schema(depth + 1)}, "required": ["n"]}
                for tag in self.random.sample(["u", "v", "w"], 2)
            ]
        return [self.schema(depth + 1) for _ in range(self.random.randrange(1, 4))]

    def _reference(self) -> str:
        here = "#/$defs/" if self.draft is None or "2020" in self.draft else "#/definitions/"
        return self.random.choice([here + "d0", here + "d1", here + "d1", here + "x~1y", "#", here + "none", "other.json"])

    def _add_applicator(self, schema: dict[str, Any], depth: int) -> None:
        key = self.random.choice(["anyOf", "allOf", "oneOf", "enum", "const", "$ref", "not", "if", "dependentRequired"])
        value: Any = True
        if key in ("anyOf", "allOf", "oneOf"):
            value = self._several(depth)
        elif key == "enum":
            value = [self.value() for _ in range(3)]
        elif key == "const":
            value = self.value()
        elif key == "$ref":
            value = self._reference()
        elif key in ("not", "if"):
            value = self.schema(depth + 1)
        elif key == "dependentRequired":
            value = {"a": self.random.sample(NAMES[:4], 1)}
        if key not in ("not", "if") or self.chance(0.3):
            schema.setdefault(key, value)

    def value(self, depth: int = 0) -> Any:
        """A constant."""
        kind = self.random.randrange(9 if depth < 2 else 6)
        if kind == 0:
            return None
        if kind == 1:
            return self.chance(0.5)
        if kind == 2:
            return self.random.choice([0, 1, -3, 7, 42, 10**12, -1, 2**53, 2**53 + 1, 10**20])
        if kind == 3:
            return self.random.choice([0.5, -1.25, 3.75, 1e-3, 2.0, -0.0, 0.1, 1e-7, 1e300])
        if kind in (4, 5):
            return self.random.choice(
                ["", "a", "yes", "b c", "é", 'q"u', "x/y", "\n", "abab", "back\\slash", "\x01", "😀", "\u2028"]
            )
        if kind == 6:
            return [self.value(depth + 1) for _ in range(self.random.randrange(3))]
        if kind == 7:
            return {name: self.value(depth + 1) for name in self.random.sample(NAMES, self.random.randrange(3))}
        return "aab"

    def _keywords(self, types: list[str], depth: int) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        for name in types:
            if name == "string":
                keywords |= self._string()
            elif name in ("integer", "number"):
                keywords |= self._number(whole=name == "integer")
            elif name == "array":
                keywords |= self._array(depth)
            elif name == "object":
                keywords |= self._object(depth)
        return keywords

    def _number(self, *, whole: bool) -> dict[str, Any]:
        pick, keywords = self.random.choice, {}
        if self.chance(0.5):
            keywords["minimum"] = pick([-10, 0, 1, 3, 100, -1000000, -(2**63)] if whole else [-1.5, 0.25, 2.75, 0, -1, 0.1])
        if self.chance(0.5):
            keywords["maximum"] = pick([5, 10, 200, 7, 0, 10**9, 2**64] if whole else [1.5, 10.25, 9.75, 3, 1e20])
        if self.chance(0.2):
            keywords["exclusiveMinimum"] = True if self.draft == DRAFTS[0] else pick([0, -5, 2, 0.5])
        if self.chance(0.2):
            keywords["exclusiveMaximum"] = True if self.draft == DRAFTS[0] else pick([10, 8, 100, 3.5])
        if self.chance(0.25):
            keywords["multipleOf"] = pick([1, 2, 3, 5, 0.5, 10, 0.25, 0.01, 7, 1.5, 10**7])
        return keywords

    def _string(self) -> dict[str, Any]:
        pick, keywords = self.random.choice, {}
        if self.chance(0.4):
            keywords["minLength"] = pick([0, 1, 2, 3, 5, 2.0])
        if self.chance(0.4):
            keywords["maxLength"] = pick([0, 1, 3, 5, 8, 20])
        if self.chance(0.35):
            keywords["pattern"] = pick(TEXT_PATTERNS) if self.chance(0.95) else pick(REFUSED_PATTERNS)
        if self.chance(0.15):
            keywords["format"] = pick(FORMATS) if self.chance(0.95) else pick(["iri", "regex", "int32", "unknown"])
        return keywords

    def _array(self, depth: int) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        if self.chance(0.7):
            keywords["items"] = self.schema(depth + 1)
        if self.chance(0.3):
            prefix = [self.schema(depth + 1) for _ in range(self.random.randrange(1, 3))]
            if self.draft is None or "2020" in self.draft:
                keywords["prefixItems"] = prefix
            else:
                keywords["items"], keywords["additionalItems"] = prefix, keywords.get("items", True)
        if self.chance(0.4):
            keywords["minItems"] = self.random.randrange(4)
        if self.chance(0.4):
            keywords["maxItems"] = self.random.randrange(5)
        if self.chance(0.08):
            keywords["uniqueItems"] = self.chance(0.6)
        if self.chance(0.05):
            keywords[self.random.choice(["contains", "unevaluatedItems"])] = self.schema(depth + 1)
        return keywords

    def _object(self, depth: int) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        if self.chance(0.8):
            names = self.random.sample(NAMES, self.random.randrange(1, 4))
            keywords["properties"] = {name: self.schema(depth + 1) for name in names}
        if self.chance(0.5):
            keywords["required"] = self.random.sample(NAMES[:5], self.random.randrange(1, 3))
        if self.chance(0.5):
            keywords["additionalProperties"] = self.schema(depth + 1) if self.chance(0.3) else self.chance(0.4)
        if self.chance(0.2):
            patterns = self.random.sample(NAME_PATTERNS, self.random.randrange(1, 3))
            keywords["patternProperties"] = {pattern: self.schema(depth + 1) for pattern in patterns}
        for key in ("minProperties", "maxProperties"):
            if self.chance(0.12):
                keywords[key] = self.random.randrange(4)
        self._object_extras(keywords, depth)
        return keywords

    def _object_extras(self, keywords: dict[str, Any], depth: int) -> None:
        if self.chance(0.06):
            keywords["propertyNames"] = self.random.choice(
                [{"pattern": "^a"}, {"enum": NAMES[:3]}, {"maxLength": 2}, {"const": "b"}, False, {"format": "date"}]
            )
        if self.chance(0.05):
            keywords["dependentRequired"] = {"a": ["b"]}
        if self.chance(0.03):
            keywords["dependentSchemas"] = {"a": self.schema(depth + 1)}
        if self.chance(0.03):
            keywords["unevaluatedProperties"] = self.chance(0.2)


def _parts(schema: Any) -> list[dict[str, Any]]:
    """All schemas inside of a schema, itself included."""
    if not isinstance(schema, dict):
        return []
    found = [schema]
    for key in ("items", "additionalProperties", "not", "contains", "propertyNames"):
        found += _parts(schema.get(key))
    for key in ("anyOf", "allOf", "oneOf", "prefixItems"):
        for part in schema.get(key, ()):
            found += _parts(part)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        for part in schema.get(key, {}).values():
            found += _parts(part)
    return found


def relaxed(schema: Any, seed: int) -> Any:
    """The schema with one or two keywords dropped or changed: what satisfies it may break the original."""
    rng, result = random.Random(seed), copy.deepcopy(schema)
    for _ in range(rng.randrange(1, 3)):
        parts = _parts(result)
        part = rng.choice(parts) if parts else {}
        keys = [key for key in part if key not in ("$schema", "$defs", "definitions", "description")]
        if not keys:
            continue
        key = rng.choice(keys)
        value = part[key]
        if isinstance(value, list) and len(value) > 1:
            value.pop(rng.randrange(len(value)))
        elif key in ("properties", "patternProperties") and value and rng.random() < 0.5:
            value.pop(rng.choice(list(value)))
        elif isinstance(value, int) and not isinstance(value, bool):
            part[key] = value + rng.choice([-1, 1, 2])
        else:
            del part[key]
    return result


def _checker() -> jsonschema.FormatChecker:
    """Formats by other means than regular expressions, where the library needs packages that are not installed."""
    checker = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])

    def check(name: str, test: Any) -> None:
        checker.checks(name, raises=(ValueError, AssertionError))(lambda text: not isinstance(text, str) or bool(test(text)))

    check("date-time", lambda text: datetime.datetime.fromisoformat(text).tzinfo is not None and text[10] == "T")
    check("time", lambda text: datetime.time.fromisoformat(text).tzinfo is not None)
    check("hostname", lambda text: len(text) <= 253 and all(_is_label(label) for label in text.split(".")))
    check("duration", _is_duration)
    check(
        "uri",
        lambda text: bool(urllib.parse.urlsplit(text).scheme) and text.isascii() and not set(text) & set(' "<>\\^`{|}'),
    )
    check(
        "json-pointer", lambda text: text == "" or (text[0] == "/" and "~" not in text.replace("~0", "").replace("~1", ""))
    )
    return checker


def _is_label(label: str) -> bool:
    return (
        1 <= len(label) <= 63 and label.isascii() and label.replace("-", "a").isalnum() and "-" not in (label[0], label[-1])
    )


def _is_duration(text: str) -> bool:
    if re.fullmatch(r"P\d+W", text):
        return True
    date, _, time = text[1:].partition("T")
    units = re.sub(r"\d+", "", date), re.sub(r"\d+", "", time)
    if text[0] != "P" or text.endswith("T") or not (date or time):
        return False
    return units[0] in "YMD" and units[1] in "HMS" and all(re.fullmatch(r"(\d+[A-Z])*", part) for part in (date, time))


_FORMAT_CHECKER = _checker()


def _multiple_of(validator: Any, divisor: Any, instance: Any, schema: Any) -> Any:
    """`multipleOf` in whole numbers: the library fails at exponents such as 1e99999."""
    if validator.is_type(instance, "number"):
        (_, digits, exponent), step = Decimal(instance).as_tuple(), Decimal(divisor)
        shift = -int(step.as_tuple().exponent) if int(step.as_tuple().exponent) < 0 else 0
        modulus = int(step.scaleb(shift))
        number, power = int("".join(map(str, digits))), int(exponent) + shift
        rest = number * pow(10, power, modulus) % modulus if power >= 0 else number % (modulus * 10**-power)
        if rest:
            yield jsonschema.ValidationError(f"{instance} is not a multiple of {divisor}")


def _number(text: str) -> Decimal | int:
    """A number as written, with exponents beyond all limits brought back to one that can be computed with.

    Without a fraction it is whole, however it is written.
    """
    mantissa, _, exponent = text.lower().partition("e")
    value = Decimal(f"{mantissa}e{max(min(int(exponent or 0), 3000), -3000)}")
    return int(value) if value == value.to_integral_value() else value


def is_valid(schema: Any, text: str) -> bool:
    """Whether the jsonschema library accepts JSON text, with numbers as exact decimals."""
    exact = json.loads(json.dumps(schema), parse_float=_number)
    base = jsonschema.Draft202012Validator
    if isinstance(exact, dict):
        base = jsonschema.validators.validator_for(exact, default=base)
    validator = jsonschema.validators.extend(base, {"multipleOf": _multiple_of})
    return bool(validator(exact, format_checker=_FORMAT_CHECKER).is_valid(json.loads(text, parse_float=_number)))


@dataclass
class RandomModel:
    """Logits that depend on nothing but a seed: uniform or Zipf over a shuffled vocabulary."""

    vocabulary: Vocabulary
    seed: int
    weights: np.ndarray = field(init=False)
    random: np.random.Generator = field(init=False)
    distances: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.distances = np.array([self._distance(i) for i in range(self.vocabulary.size)])
        self.random = np.random.default_rng(self.seed)
        self.weights = np.arange(1, self.vocabulary.size + 1) ** -self.random.choice([0.0, 1.0, 2.0])
        self.random.shuffle(self.weights)

    def draw(self, allowed: np.ndarray) -> int:
        sums = self.weights[allowed].cumsum()
        return int(allowed[min(sums.searchsorted(self.random.random() * sums[-1], side="right"), len(allowed) - 1)])

    def steer(self, allowed: np.ndarray) -> int:
        """Mostly the token that is likeliest to end things, sometimes any."""
        if self.random.random() < 0.2:
            return int(allowed[self.random.integers(len(allowed))])
        return int(allowed[self.distances[allowed].argmin()])

    def _distance(self, token_id: int) -> int:
        if token_id in self.vocabulary.eos_ids:
            return 0
        text = self.vocabulary.tokenizer.token_bytes(token_id)
        return (100 if text[:1] in (b'"', b"]", b"}") else 200) + len(text)


def write(matcher: Matcher, model: RandomModel, free_tokens: int = FREE_TOKENS) -> tuple[str, list[int]]:
    """Let the model write until a stop id: "done", "unfinished" after many tokens, or "stuck"."""
    size = model.vocabulary.size
    row, written = allocate(1, size)[0], []
    for step in range(MAX_TOKENS):
        try:
            matcher.fill(row)
        except GrammarError:
            return "stuck", written
        allowed = allowed_ids(row, size)
        token_id = model.draw(allowed) if step < free_tokens else model.steer(allowed)
        assert matcher.accept(token_id), f"the mask allows {token_id}, the matcher does not"
        if token_id in model.vocabulary.eos_ids:
            return "done", written
        written.append(token_id)
    return "unfinished", written


def text_of(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    return b"".join(vocabulary.tokenizer.token_bytes(i) for i in token_ids).decode("utf-8")


def accepts(matcher: Matcher, token_ids: list[int]) -> bool:
    """Whether a fresh matcher accepts these tokens as a whole answer."""
    return all(matcher.accept(i) for i in token_ids) and matcher.is_accepting


def check_seed(
    seed: int, compiler: GrammarCompiler, vocabulary: Vocabulary, counts: Counter[str], problems: list[str]
) -> None:
    """Generate a schema; if it is accepted, write under it and under a relaxed one, and compare with jsonschema."""
    schema = SchemaGenerator(seed).document()
    grammar = _compile(schema, compiler, counts)
    if grammar is None:
        return
    counts["accepted"] += 1
    model = RandomModel(vocabulary, seed)
    outcome, written = write(grammar.matcher(), model, FREE_TOKENS if seed % 2 else 12)
    counts[outcome] += 1
    if outcome == "stuck":
        problems.append(f"seed {seed}: stuck after {text_of_prefix(vocabulary, written)!r} in {json.dumps(schema)}")
    if outcome == "done":
        text = text_of(vocabulary, written)
        right = is_valid(schema, text)
        counts["valid" if right else "invalid"] += 1
        if not right:
            problems.append(f"seed {seed}: wrote {text!r} for {json.dumps(schema)}")
    for variant in range(2):
        other = relaxed(schema, 10 * seed + variant)
        loose = _compile(other, compiler, Counter())
        if loose is None:
            continue
        outcome, written = write(loose.matcher(), model, 24)
        if outcome != "done":
            continue
        text = text_of(vocabulary, written)
        right, accepted = is_valid(schema, text), accepts(grammar.matcher(), written)
        counts[f"probe {'valid' if right else 'invalid'} {'accepted' if accepted else 'rejected'}"] += 1
        if accepted and not right:
            problems.append(f"seed {seed}: accepts {text!r} for {json.dumps(schema)}")


def text_of_prefix(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    return b"".join(vocabulary.tokenizer.token_bytes(i) for i in token_ids).decode("utf-8", errors="replace")


def _compile(schema: Any, compiler: GrammarCompiler, counts: Counter[str]) -> Any:
    try:
        return compiler.compile(StructuredOutput(json=schema))
    except InvalidRequest as error:
        counts["refused"] += 1
        where = re.search(r": (\$[^ ]*): ", str(error))
        counts["refused with a path"] += where is not None or schema is False
        return None
