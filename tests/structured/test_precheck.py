"""What would not be enforced is refused, with keyword and path."""

import json
import random

import pytest

from abyssal.core.errors import InvalidRequest
from abyssal.structured.dialect import ANNOTATIONS, LATEST
from abyssal.structured.document import SchemaError
from abyssal.structured.precheck import check_schema
from abyssal.structured.spec import StructuredOutput

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


REFUSALS = [
    ({"properties": {"a": {"not": {}}}}, "$.properties.a.not", "not enforced"),
    ({"items": {"if": {}, "then": {}}}, "$.items.if", "branches of anyOf"),
    ({"contains": {}}, "$.contains", "not enforced"),
    ({"type": "array", "uniqueItems": True}, "$.uniqueItems", "not enforced"),
    ({"$dynamicRef": "#x"}, "$.$dynamicRef", "use $ref"),
    ({"anyOf": [{}, {"minimun": 3}]}, "$.anyOf[1].minimun", "no keyword"),
    ({"type": "string", "nullable": True}, "$.nullable", "'null'"),
    ({"x-guidance": {"lenient": True}}, "$.x-guidance", "no keyword"),
    ({"items": [{}]}, "$.items", "prefixItems"),
    ({"$schema": DRAFT_7, "prefixItems": [{}]}, "$.prefixItems", "draft-07"),
    (
        {"$schema": DRAFT_7, "$ref": "#/definitions/a", "maxLength": 1, "definitions": {"a": {}}},
        "$.maxLength",
        "beside $ref",
    ),
    ({"$schema": "http://example.org/draft"}, "$.$schema", "known are draft-04"),
    ({"$ref": "#/$defs/none"}, "$.$ref", "points nowhere"),
    ({"$ref": "#none"}, "$.$ref", "no such $anchor"),
    ({"$ref": "https://example.org/other.json"}, "$.$ref", "under $defs"),
    ({"properties": {"a": {"$id": "b.json"}}}, "$.properties.a.$id", "own $id"),
    ({"$ref": "#"}, "$.$ref", "same place"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}}, "$.$defs.a.$ref", "same place"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "$", "no finite value"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$", "no finite value"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf[0]", "together with $.oneOf[1]"),
    ({"oneOf": [{"required": ["a", "b"]}, {"required": ["c"]}]}, "$.oneOf[0]", "write anyOf"),
    ({"type": "foo"}, "$.type", "none of null"),
    ({"type": []}, "$.type", "allows nothing"),
    ({"enum": []}, "$.enum", "not empty"),
    ({"enum": [1, 2**53 + 1]}, "$.enum[1]", "rounded"),
    ({"const": {"a": [1e300]}}, "$.const.a[0]", "rounded"),
    ({"const": "a\x01"}, "$.const", "control character"),
    ({"const": "\ud800"}, "$.const", "surrogate"),
    ({"minimum": "1"}, "$.minimum", "finite number"),
    ({"minimum": True}, "$.minimum", "finite number"),
    ({"type": "number", "maximum": 1e300}, "$.maximum", "beyond 2**53"),
    ({"type": "integer", "minimum": 2**64}, "$.minimum", "beyond 2**53"),
    ({"multipleOf": 0}, "$.multipleOf", "above 0"),
    ({"multipleOf": 10**9}, "$.multipleOf", "too many digits"),
    ({"minLength": -1}, "$.minLength", "whole number"),
    ({"minLength": 1.5}, "$.minLength", "whole number"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "$.minLength", "nothing satisfies both"),
    ({"pattern": "(?=a)"}, "$.pattern", "look-ahead"),
    ({"pattern": "(a)\\1"}, "$.pattern", "back-references"),
    ({"pattern": "(a{1,500}){1,500}"}, "$.pattern", "250000 positions"),
    ({"pattern": 5}, "$.pattern", "must be a string"),
    ({"format": "regex"}, "$.format", "known are date"),
    ({"type": "integer", "format": "int32"}, "$.format", "known are date"),
    ({"properties": []}, "$.properties", "must be an object"),
    ({"required": "a"}, "$.required", "list of names"),
    ({"required": ["a"], "additionalProperties": False}, "$.required", "required but not allowed"),
    ({"type": "object", "minProperties": 2}, "$.minProperties", "come twice"),
    ({"properties": {"a": {}}, "maxProperties": 1}, "$.maxProperties", "optional properties"),
    ({"propertyNames": {"format": "date"}}, "$.propertyNames", "one of them"),
    ({"patternProperties": {"^\\w": {}}}, '$.patternProperties["^\\\\w"]', "different readers"),
    ({"patternProperties": {"(": {}}}, '$.patternProperties["("]', "ends too early|not closed"),
    ({"allOf": [{}], "unevaluatedProperties": False}, "$.unevaluatedProperties", "beside"),
    ({"allOf": []}, "$.allOf", "not empty"),
    ({"properties": {"a": 3}}, "$.properties.a", "object or a boolean"),
    (nested(80), "$" + ".properties.a" * 65, "nested more than 64"),
    ({"properties": {f"p{i}": {} for i in range(1001)}}, "$.properties", "the limit is 1000"),
    ({"enum": list(range(10_001))}, "$.enum", "the limit is 10000"),
]


@pytest.mark.parametrize(("schema", "path", "reason"), REFUSALS, ids=[json.dumps(s)[:60] for s, _, _ in REFUSALS])
def test_refused_with_its_path(schema: dict, path: str, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason if "|" in reason else None) as caught:
        check_schema(schema)
    assert caught.value.path == path
    assert "|" in reason or reason in caught.value.reason


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        (
            {"items": {"properties": {"z": {"patternProperties": {"^a": {}, "a$": {}}}}}},
            "$.items.properties.z.patternProperties",
            "disjoint",
        ),
        ({"allOf": [{"type": "string", "pattern": "^a+$"}, {"type": "string", "pattern": "^b+$"}]}, "$", "Unsatisfiable"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "$", "Unsatisfiable"),
    ],
)
def test_refused_by_the_library_alone_with_its_path(kit, schema: dict, path: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kit.compiler.compile(StructuredOutput(json=schema))
    assert caught.value.parameter == "json"
    assert f": {path}: " in str(caught.value)
    assert reason in str(caught.value)


def test_optional_parts_without_a_value_are_left_out(kit) -> None:
    endless = {"type": "object", "properties": {"n": {"$ref": "#/$defs/e"}}, "required": ["n"]}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/e"}, "b": {"type": "integer"}},
        "$defs": {"e": endless},
    }
    assert kit.accepts('{"b": 1}', json=schema)
    assert kit.rejects('{"a": {"n": 1}}', json=schema)
    matcher = kit.matcher(json=schema)
    assert kit.feed(matcher, kit.byte_ids('{"a"')) == 3


def test_deep_schemas_are_split(kit) -> None:
    text = '{"a": ' * 60 + "1" + "}" * 60
    assert kit.accepts(text, json=nested(60))
    assert kit.rejects(text.replace("1", "true"), json=nested(60))


def test_bounds_of_machine_integers_are_kept_inside(kit) -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}
    assert kit.accepts("9223372036854774784", json=schema)
    assert kit.rejects("18446744073709551616", json=schema)
    assert kit.rejects("-9223372036854775809", json=schema)


def test_schema_text_with_a_name_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'type' occurs twice"):
        StructuredOutput(json='{"type": "integer", "type": "string"}')


def test_oneof_of_references_with_a_tag_is_proved(kit) -> None:
    branches = {
        tag: {"type": "object", "properties": {"kind": {"enum": [tag]}, "v": {}}, "required": ["kind"]}
        for tag in ("cat", "dog", "cow")
    }
    schema = {
        "oneOf": [{"$ref": f"#/$defs/{tag}"} for tag in branches],
        "discriminator": {"propertyName": "kind"},
        "$defs": branches,
    }
    assert kit.accepts('{"kind": "dog", "v": 1}', json=schema)
    assert kit.rejects('{"kind": "pig"}', json=schema)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"type": "integer"}, {"type": "string"}),
        ({"type": ["integer", "null"]}, {"type": ["string", "boolean"]}),
        ({"const": 1}, {"const": True}),
        ({"const": [1]}, {"const": [True]}),
        ({"enum": [1, "a"]}, {"enum": [2, "b"]}),
        ({"type": "number", "maximum": 1}, {"type": "number", "minimum": 2}),
        ({"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}),
        ({"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"type": "null"}}},
            {"type": "object", "properties": {"a": {"type": "string"}}},
        ),
        ({"type": "object", "required": ["a"]}, {"type": "object", "additionalProperties": False}),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, {"type": "integer"}),
        ({"allOf": [{"type": "null"}]}, {"type": "integer"}),
        (False, {}),
    ],
)
def test_disjoint_branches(a: object, b: object) -> None:
    check_schema({"oneOf": [a, b]})
    check_schema({"oneOf": [b, a]})


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ({"const": 1}, {"const": 1.0}, 1),
        ({"type": "integer"}, {"enum": [1.0]}, 1),
        ({"type": "number", "maximum": 1}, {"type": "number", "minimum": 1}, 1),
        ({"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}, {"a": 1, "b": 1}),
        (
            {"type": "object", "properties": {"a": {"type": "null"}}},
            {"type": "object", "properties": {"a": {"type": "string"}}},
            {},
        ),
        ({"minimum": 5}, {"maximum": 3}, "text"),
        (
            {"required": ["a"], "properties": {"a": {"const": 1}}},
            {"required": ["a"], "properties": {"a": {"const": 2}}},
            "text",
        ),
    ],
)
def test_branches_with_a_common_value_are_not_called_disjoint(corpus, a: dict, b: dict, common: object) -> None:
    assert corpus.is_valid(a, json.dumps(common))
    assert corpus.is_valid(b, json.dumps(common))
    with pytest.raises(SchemaError, match="may hold together"):
        check_schema({"oneOf": [a, b]})


def malformed(rng: random.Random, depth: int = 0) -> object:
    """JSON that uses the names of keywords, with values of any kind in their places."""
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 5:
        return rng.choice([None, True, False, 0, -1, 1.5, 1e400, "", "a", "#", "string", "#/$defs/a", "(", [], {}])
    if kind == 5:
        return [malformed(rng, depth + 1) for _ in range(rng.randrange(3))]
    keywords = sorted(LATEST.keywords | ANNOTATIONS)
    return {rng.choice([*keywords, "a"]): malformed(rng, depth + 1) for _ in range(rng.randrange(1, 4))}


def test_any_json_is_either_checked_or_refused(kit) -> None:
    rng, outcomes = random.Random(0), set()
    for _ in range(6000):
        schema = malformed(rng)
        try:
            outcomes.add(json.dumps(check_schema(schema).schema, allow_nan=False)[:1])
        except SchemaError as error:
            outcomes.add(error.path[:1])
    assert outcomes == {"{", "$"}
