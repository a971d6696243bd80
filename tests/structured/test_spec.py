import pytest

from abyssal.core.errors import InvalidRequest
from abyssal.structured.spec import StructuredOutput, from_response_format

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("arguments", "parameter", "reason"),
    [
        ({}, "structured", "exactly one of json"),
        ({"json": {}, "regex": "a"}, "structured", "exactly one of"),
        ({"json": False}, "json", "allows no value"),
        ({"json": "{"}, "json", "is not JSON"),
        ({"json": "3"}, "json", "an object or true"),
        ({"json": '{"minimum": NaN}'}, "json", "NaN is no JSON number"),
        ({"json": {"minimum": float("inf")}}, "json", "is not JSON"),
        ({"json": {"default": object()}}, "json", "is not JSON"),
        ({"json": {"description": "x" * (1 << 20)}}, "json", "the limit is 1048576"),
        ({"json": 5}, "json", "as a dict or text"),
        ({"json_object": 1}, "json_object", "True or False"),
        ({"regex": " "}, "regex", "not blank"),
        ({"regex": "a\0"}, "regex", "NUL"),
        ({"regex": 5}, "regex", "must be a string"),
        ({"grammar": "x" * (1 << 19)}, "grammar", "the limit is"),
        ({"choice": []}, "choice", "not empty"),
        ({"choice": "ab"}, "choice", "must be a list"),
        ({"choice": ["a", ""]}, "choice", "not empty"),
        ({"choice": ["\ud800"]}, "choice", "surrogate"),
        ({"choice": ["a"] * 10_001}, "choice", "10001 texts"),
        ({"regex": "a", "max_whitespace": 65}, "max_whitespace", "[0, 64]"),
        ({"regex": "a", "max_whitespace": True}, "max_whitespace", "[0, 64]"),
        ({"regex": "a", "backend": "outlines"}, "backend", "auto, llguidance, xgrammar"),
        ({"regex": "a", "thinking": 1}, "thinking", "True or False"),
        ({"regex": "a", "tool_choice": "none"}, "tool_choice", "without tools"),
        ({"tools": []}, "tools", "not empty"),
        ({"tools": [{"name": "f"}]}, "tools[0]", "must be {"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [TOOL, TOOL]}, "tools", "twice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "auto, none, required"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "one of the functions f",
        ),
        ({"tools": [TOOL], "tools_opened": True}, "tools_opened", "needs tool_choice required"),
    ],
)
def test_bad_specifications_name_the_parameter(arguments: dict, parameter: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutput(**arguments)
    assert caught.value.parameter == parameter
    assert reason in str(caught.value)


def test_content_is_kept_as_text_and_compared() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    one, two = StructuredOutput(json=schema), StructuredOutput(json='{"type":"object","properties":{"b":{},"a":{}}}')
    assert one == two
    assert one.key == two.key
    assert list(one.schema()["properties"]) == ["b", "a"]
    schema["properties"]["c"] = {}
    assert "c" not in one.schema()["properties"], "a later change of the dict must not reach the specification"
    hash(StructuredOutput(tools=[TOOL]))


def test_everything_that_decides_is_in_the_key() -> None:
    schema = {"properties": {"b": {}, "a": {}}}
    specs = [
        StructuredOutput(json=schema),
        StructuredOutput(json={"properties": {"a": {}, "b": {}}}),
        StructuredOutput(json=schema, max_whitespace=0),
        StructuredOutput(json=schema, thinking=True),
        StructuredOutput(json=schema, backend="xgrammar"),
        StructuredOutput(json_object=True),
        StructuredOutput(regex="a"),
        StructuredOutput(choice=["a"]),
        StructuredOutput(grammar="a"),
        *(StructuredOutput(tools=[TOOL], tool_choice=choice) for choice in ("auto", "none", "required", NAMED)),
        StructuredOutput(tools=[TOOL], parallel_tool_calls=False),
    ]
    assert len({spec.key for spec in specs}) == len(specs)


def test_response_formats() -> None:
    assert from_response_format(None) is None
    assert from_response_format({"type": "text"}) is None
    assert from_response_format({"type": "json_object"}, thinking=True) == StructuredOutput(json_object=True, thinking=True)
    schema = {"type": "integer"}
    assert from_response_format({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}) == StructuredOutput(
        json=schema
    )
    for bad in ({"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "n"}}, "json"):
        with pytest.raises(InvalidRequest, match="response_format"):
            from_response_format(bad)
