"""The extra backend: the same interface, and schemas limited to what it enforces."""

import json
from collections import Counter

import pytest

from abyssal.core.errors import InvalidRequest
from abyssal.structured.mask import allocate, allowed_ids
from abyssal.structured.matcher import fill_many
from abyssal.structured.spec import StructuredOutput

pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"type": "array", "items": {"enum": ["x", None]}}},
    "required": ["a"],
    "additionalProperties": False,
}


def test_the_same_texts_are_accepted(kit) -> None:
    for spec, texts in (
        ({"json": SCHEMA}, ['{"a": 1}', '{"a":1, "b": ["x", null]}', '{"a": -1}', '{"b": []}', '{"a": 1, "c": 2}']),
        ({"json": SCHEMA, "max_whitespace": 0}, ['{"a":1}', '{"a": 1}']),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}', "[]"]),
        ({"regex": "ab*c"}, ["abbc", "ab", "abcc"]),
        ({"choice": ["yes", 'a"b']}, ["yes", 'a"b', "no"]),
        ({"grammar": 'root ::= "(" root ")" | [a-z]*'}, ["((a))", "((a)"]),
    ):
        verdicts = [kit.accepts(text, **spec, backend="xgrammar") for text in texts]
        assert verdicts == [kit.accepts(text, **spec) for text in texts], spec
        assert len(set(verdicts)) == 2


def test_drafts_rollback_and_stop_ids(kit) -> None:
    matcher = kit.matcher(stop_ids=(2,), regex="ab*c", backend="xgrammar")
    masks = allocate(4, kit.vocabulary.size)
    assert fill_many([(matcher, 0, kit.byte_ids("azc"))], masks)[0].num_legal == 1
    assert kit.feed(matcher, kit.byte_ids("abc")) == 3
    assert kit.mask(matcher) == kit.vocabulary.eos_ids | {2}
    assert matcher.accept(2)
    matcher.rollback(3)
    twin = matcher.fork()
    assert (
        kit.mask(twin)
        == kit.mask(matcher)
        == set(kit.byte_ids("bc"))
        | {i for i in kit.vocabulary.text_ids if set(kit.vocabulary.tokenizer.token_bytes(i)) == {98}}
    )


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"json": {"properties": {"a": {"type": "string", "pattern": "a"}}, "type": "object"}}, "$.properties.a.pattern"),
        ({"json": {"type": "string", "maxLength": 2}}, "$.maxLength"),
        ({"json": {"allOf": [{}]}}, "$.allOf"),
        ({"json": {"type": "object", "required": ["z"]}}, "$.required"),
        ({"json": {"not": {}}}, "$.not"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "backend"),
        ({"grammar": 'start: "a"'}, "backend"),
    ],
)
def test_what_it_does_not_enforce_is_refused(kit, spec: dict, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kit.compiler.compile(StructuredOutput(**spec, backend="xgrammar"))
    assert reason in str(caught.value)


@pytest.mark.slow
def test_random_schemas(kit, corpus) -> None:
    counts: Counter[str] = Counter()
    for seed in range(600):
        schema = corpus.SchemaGenerator(seed).document()
        try:
            grammar = kit.compiler.compile(StructuredOutput(json=schema, backend="xgrammar"))
        except InvalidRequest:
            counts["refused"] += 1
            continue
        outcome, written = corpus.write(grammar.matcher(), corpus.RandomModel(kit.vocabulary, seed))
        counts[outcome] += 1
        if outcome == "done":
            assert corpus.is_valid(schema, kit.text(written)), f"seed {seed}: {kit.text(written)!r} for {json.dumps(schema)}"
    assert counts["stuck"] == 0
    assert counts["done"] > 150
    assert len(allowed_ids(allocate(1, kit.vocabulary.size)[0], kit.vocabulary.size)) == kit.vocabulary.size
