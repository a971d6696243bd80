"""Tool calls: what the grammar allows is what the chat parser reads back, with arguments that satisfy their schema."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from abyssal.core.errors import InvalidRequest
from abyssal.core.sampling_params import SamplingParams
from abyssal.structured.rules import Phase
from abyssal.structured.spec import StructuredOutput
from abyssal.text.chat import ChatTemplate
from abyssal.text.tokenizer import Tokenizer

D = "｜DSML｜"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
        "area": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now-2", "description": "d"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def parameter(name: str, value: str, *, text: bool) -> str:
    return f'<{D} parameter name="{name}" string="{"true" if text else "false"}">{value}</{D} parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'<{D} invoke name="{name}">\n{"".join(parameters)}</{D} invoke>\n'


def calls(*invokes: str) -> str:
    return f"\n\n<{D} calls>\n{''.join(invokes)}</{D} calls>"


CITY, DAYS = parameter("city", "Par</is>\n<b>", text=True), parameter("days", "3", text=False)
CALL = invoke("weather", CITY, DAYS)
NOW = invoke("now-2")


def test_choice_auto(kit) -> None:
    spec = {"tools": TOOLS}
    for text in ("Hello.", "", "a < b\n\n<", f"Let me see.{calls(CALL)}", calls(CALL, NOW, CALL)):
        assert kit.accepts(text, **spec), text
    for text in (
        f"{calls(CALL)} and",
        f"{calls(CALL)}{calls(CALL)}",
        f"Hi.\n<{D} calls>\n",
        f"Hi <{D} calls>\n",
        calls(),
        f"{D}",
    ):
        assert kit.rejects(text, **spec), text


def test_choice_none_forbids_the_opener(kit) -> None:
    spec = {"tools": TOOLS, "tool_choice": "none"}
    assert kit.accepts("Hello.\n\n<", **spec)
    assert kit.rejects(calls(CALL), **spec)


def test_choice_required_forbids_text(kit) -> None:
    spec = {"tools": TOOLS, "tool_choice": "required"}
    assert kit.accepts(calls(CALL), **spec)
    assert kit.accepts(calls(NOW, CALL), **spec)
    assert kit.rejects("Hello.", **spec)
    assert kit.rejects(f"Hello.{calls(CALL)}", **spec)
    assert not kit.matcher(**spec).is_accepting


def test_named_function(kit) -> None:
    spec = {"tools": TOOLS, "tool_choice": NAMED}
    assert kit.accepts(calls(CALL, CALL), **spec)
    assert kit.rejects(calls(NOW), **spec)


def test_single_call(kit) -> None:
    spec = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    assert kit.accepts(calls(CALL), **spec)
    assert kit.rejects(calls(CALL, CALL), **spec)


def test_prompt_that_holds_the_opener(kit) -> None:
    spec = {"tools": TOOLS, "tool_choice": "required", "tools_opened": True}
    assert kit.accepts(f"{CALL}</{D} calls>", **spec)
    assert kit.rejects(calls(CALL), **spec)


@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        (CALL, True),
        (invoke("weather", CITY), False),
        (invoke("weather", DAYS, CITY), False),
        (invoke("weather", CITY, DAYS, DAYS), False),
        (invoke("weather", CITY, parameter("days", "8", text=False)), False),
        (invoke("weather", CITY, parameter("days", "3", text=True)), False),
        (invoke("weather", parameter("city", '"Paris"', text=False), DAYS), False),
        (invoke("weather", CITY, DAYS, parameter("unit", "C", text=True)), True),
        (invoke("weather", CITY, DAYS, parameter("unit", "K", text=True)), False),
        (invoke("weather", CITY, DAYS, parameter("note", "123456789", text=True)), True),
        (invoke("weather", CITY, DAYS, parameter("note", "1234567890", text=True)), False),
        (invoke("weather", CITY, DAYS, parameter("note", "null", text=False)), True),
        (invoke("weather", CITY, DAYS, parameter("area", '{"lat": 1.5}', text=False)), True),
        (invoke("weather", CITY, DAYS, parameter("area", "{}", text=False)), False),
        (invoke("weather", CITY, DAYS, parameter("other", "1", text=False)), False),
        (invoke("unknown"), False),
        (f'<{D} invoke name="weather">{CITY}{DAYS}</{D} invoke>\n', False),
        (CALL.replace(f"<{D} ", f"<{D}"), False),
    ],
)
def test_parameters(kit, call: str, allowed: bool) -> None:
    assert (kit.accepts if allowed else kit.rejects)(calls(call), tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize("spelling", [f"\n\n<{D} tool_calls>\n", f"\n\n<{D}tool_calls>\n", f"\n\n<{D} function_calls>\n"])
def test_spellings_of_other_versions_are_rejected(kit, spelling: str) -> None:
    assert kit.rejects(spelling + CALL + f"</{D} calls>", tools=TOOLS)


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        ({}, [("x", True), ("3", False), ("[1]", False)], [('"x"', False)]),
        ({"type": ["string", "integer"]}, [("x", True), ("3", False)], [('"x"', False), ("[1]", False)]),
        ({"enum": ["a", 1]}, [("a", True), ("1", False)], [("1", True), ("b", True), ('"a"', False)]),
        ({"const": "a/b"}, [("a/b", True)], [("a", True)]),
        ({"$ref": "#/$defs/s"}, [("ab", True)], [("abc", True)]),
        ({"type": "string", "pattern": "^a/b+"}, [("a/bbx", True)], [("xa/b", True), ("a/", True)]),
        ({"type": "string", "format": "date"}, [("2024-02-29", True)], [("2023-02-29", True), ("x2024-02-29", True)]),
        ({"type": "string", "pattern": "b", "maxLength": 2}, [("ab", True)], [("abc", True), ("aa", True)]),
        ({"allOf": [{"type": "string"}, {"maxLength": 1}]}, [('"a"', False)], [('"ab"', False), ("a", True)]),
        ({"type": "array", "items": {"type": "string"}}, [('["a"]', False)], [("[1]", False), ('["a"]', True)]),
    ],
)
def test_forms_of_values(kit, schema: dict, accepted: list, rejected: list) -> None:
    parameters = {
        "type": "object",
        "properties": {"p": schema},
        "required": ["p"],
        "$defs": {"s": {"type": "string", "minLength": 1, "maxLength": 2}},
    }
    spec = {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "tool_choice": "required"}
    for value, text in accepted:
        assert kit.accepts(calls(invoke("f", parameter("p", value, text=text))), **spec), value
    for value, text in rejected:
        assert kit.rejects(calls(invoke("f", parameter("p", value, text=text))), **spec), value


@pytest.mark.parametrize(
    ("parameters", "path", "reason"),
    [
        ({"properties": {"a": {"not": {}}}}, ".properties.a.not", "not enforced"),
        (
            {"properties": {"a": {"type": "array", "items": {"contains": {}}}}},
            ".properties.a.items.contains",
            "not enforced",
        ),
        ({"anyOf": [{}]}, ".anyOf", "for the parameters of a function"),
        ({"minProperties": 1}, ".minProperties", "for the parameters of a function"),
        ({"type": "array"}, "", "schema of an object"),
        ({"required": ["a"]}, ".required", "not among the properties"),
        ({"properties": {'a"b': {}}}, '.properties["a\\"b"]', "cannot be written in a tag"),
        ({"properties": {"a": False}, "required": ["a"]}, ".properties.a", "nothing satisfies"),
        ({"properties": {"a": {"const": f"x{D}"}}}, ".properties.a", "only tags may"),
        ({"properties": {"a": {"type": "object", "properties": {D: {}}}}}, ".properties.a", "only tags may"),
        ({"properties": {"a": {"enum": ["x"], "minLength": 1, "type": "string"}}}, ".properties.a", "leave out the values"),
    ],
)
def test_parameters_that_would_not_be_enforced_are_refused(kit, parameters: dict, path: str, reason: str) -> None:
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InvalidRequest) as caught:
        kit.compiler.compile(StructuredOutput(tools=tools))
    assert caught.value.parameter == f"tools[1].function.parameters{path}"
    assert reason in str(caught.value)


def test_functions_that_are_not_strict_fall_back_to_the_syntax(kit) -> None:
    parameters = {"properties": {"a": {"not": {}}, "b": {"type": "integer"}}, "required": ["a"], "minProperties": 1}
    function = {"name": "f", "strict": False, "parameters": parameters}
    spec = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    assert kit.accepts(calls(invoke("f", parameter("a", '{"x": 1}', text=False))), **spec)
    assert kit.accepts(calls(invoke("f", parameter("a", "x", text=True), parameter("b", "1", text=False))), **spec)
    assert kit.rejects(calls(invoke("f", parameter("a", "{", text=False))), **spec)
    assert kit.rejects(calls(invoke("f", parameter("a", "1", text=False), parameter("b", "x", text=False))), **spec)


@pytest.mark.parametrize("where", ["text", "raw", "json"])
def test_no_text_can_spell_the_marker(kit, where: str) -> None:
    """Byte by byte, with tokens that are no markup: a parser of text would take it for a tag."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}}
    matcher = kit.matcher(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    before = {
        "text": "x",
        "raw": f'\n\n<{D} calls>\n<{D} invoke name="f">\n<{D} parameter name="a" string="true">x',
        "json": f'\n\n<{D} calls>\n<{D} invoke name="f">\n<{D} parameter name="b" string="false">["x',
    }[where]
    ids = kit.ids(before)
    assert kit.feed(matcher, ids) == len(ids)
    spelled = kit.byte_ids(D)
    assert kit.feed(matcher, spelled) == len(spelled) - 1
    assert spelled[-1] not in kit.mask(matcher)
    assert kit.vocabulary.dsml_id not in kit.mask(matcher)


def test_after_reasoning(kit) -> None:
    spec = {"tools": TOOLS, "tool_choice": "required", "thinking": True}
    matcher = kit.matcher(**spec)
    think_end = kit.vocabulary.think_end_id
    assert matcher.phase is Phase.REASONING
    ids = [*kit.ids("I think \n\n< so."), think_end, *kit.ids(calls(CALL))]
    assert kit.feed(matcher, ids) == len(ids)
    assert matcher.is_finished
    early = kit.matcher(**spec)
    assert not set(kit.vocabulary.eos_ids) & kit.mask(early), "the answer must not end before the calls"
    assert set(kit.vocabulary.eos_ids) <= kit.mask(kit.matcher(tools=TOOLS, thinking=True)), "with auto it may"


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory) -> Tokenizer:
    """A byte-level tokenizer with the markup that chat prompts are made of."""
    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    markup = [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
        "<think>",
        "</think>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in [*markup, "<｜System｜>", D]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([calls(CALL, NOW), '"}, {"a": [1, 2], "', "weather in Paris\n\n<"] * 4, trainer)
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    tokenizer.save(str(path))
    return Tokenizer(path, bos_token_id=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Paris", "days": 3},
        {"city": "", "days": 1, "unit": "F"},
        {"city": ' "quoted" \\ </x> \n\n < é😀 ', "days": 7, "note": "a\tb"},
        {"city": "null", "days": 2, "note": None, "area": {"lat": -1.5e-3, "x": [True, {"y": "z"}]}},
    ],
)
def test_what_is_allowed_is_read_back(kit, chat_tokenizer: Tokenizer, arguments: dict) -> None:
    values = [
        parameter(k, v if isinstance(v, str) else json.dumps(v), text=isinstance(v, str)) for k, v in arguments.items()
    ]
    text = f"Sure.{calls(invoke('weather', *values), NOW)}"
    parameters = {**WEATHER, "properties": {**WEATHER["properties"], "area": {"type": "object"}}}
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "parameters": parameters}}, TOOLS[1]]
    assert kit.accepts(text, tools=tools)
    parser = ChatTemplate(chat_tokenizer).render([{"role": "user", "content": "Hi"}], tools=tools).parser(SamplingParams())
    for token_id in chat_tokenizer.encode(text, add_bos=False):
        parser.push(token_id)
    parser.finish()
    assert parser.text == "Sure."
    assert [c["function"]["name"] for c in parser.tool_calls] == ["weather", "now-2"]
    assert json.loads(parser.tool_calls[0]["function"]["arguments"]) == arguments
    assert json.loads(parser.tool_calls[1]["function"]["arguments"] or "{}") == {}


@pytest.mark.slow
def test_what_a_random_model_calls_is_read_back_and_valid(corpus, chat_tokenizer: Tokenizer) -> None:
    from abyssal.structured.compiler import GrammarCompiler
    from abyssal.structured.vocabulary import Vocabulary

    vocabulary = Vocabulary.of(chat_tokenizer, chat_tokenizer.vocab_size + 5, [1])
    compiler = GrammarCompiler(vocabulary)
    prompt = ChatTemplate(chat_tokenizer).render([{"role": "user", "content": "Hi"}], tools=TOOLS)
    num_calls = 0
    for seed in range(40):
        matcher = compiler.compile(
            StructuredOutput(tools=TOOLS, tool_choice="required", parallel_tool_calls=seed % 2 == 0)
        ).matcher()
        outcome, written = corpus.write(matcher, corpus.RandomModel(vocabulary, seed), 150)
        if outcome != "done":
            continue
        parser = prompt.parser(SamplingParams(skip_special_tokens=False))
        for token_id in written:
            parser.push(token_id)
        parser.finish()
        assert parser.text == ""
        assert parser.tool_calls
        for call in parser.tool_calls:
            num_calls += 1
            schema = WEATHER if call["function"]["name"] == "weather" else {"maxProperties": 0}
            assert corpus.is_valid(schema, call["function"]["arguments"] or "{}"), call
    assert num_calls > 10
