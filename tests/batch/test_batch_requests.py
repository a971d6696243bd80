"""From bodies to sampling parameters: every field is obeyed, known to be harmless, or refused by name."""

from typing import Any

import pytest
from scripted import BOS, ScriptedEngine

from abyssal.batch.lines import BatchLine, LineRefused
from abyssal.batch.request import LineRequest, RequestReader
from abyssal.core.errors import AbyssalError, InvalidRequest
from abyssal.core.sampling_params import SamplingParams

USER = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
HARMLESS = {
    "model": "anything",
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "stream": False,
    "stream_options": None,
    "n": 1,
    "audio": None,
    "functions": None,
}


def read(url: str, body: dict[str, Any], *, engine: Any = None, custom_id: str = "a", **options: Any) -> LineRequest:
    return RequestReader(engine or ScriptedEngine(), **options).read(BatchLine(1, custom_id, "/v1/" + url, body))


def completion(**body: Any) -> LineRequest:
    return read("completions", {"prompt": "Hi", **body})


def chat(engine: Any = None, **body: Any) -> LineRequest:
    return read("chat/completions", {"messages": USER, **body}, engine=engine)


def params_of(request: LineRequest) -> SamplingParams:
    (part,) = request.parts
    return part.params


def test_every_field_reaches_the_sampling_parameters() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "max_tokens": 11,
        "min_tokens": 2,
        "stop": ["x", "yz"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"17": -100},
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 1,
    }
    assert params_of(completion(**given, logprobs=2)) == SamplingParams(**given, logprobs=2)
    assert params_of(chat(**given, logprobs=True, top_logprobs=3)) == SamplingParams(**given, logprobs=3)
    assert params_of(chat(logprobs=True)).logprobs == 0
    assert params_of(chat(logprobs=False)).logprobs is None
    assert params_of(chat(max_completion_tokens=5)).max_tokens == 5
    assert params_of(chat(max_completion_tokens=5, max_tokens=5)).max_tokens == 5
    assert params_of(completion(stop="end")).stop == ("end",)


def test_null_is_the_same_as_nothing() -> None:
    seed = params_of(completion()).seed
    fields = ("temperature", "top_p", "stop", "seed", "max_tokens", "logprobs", "logit_bias", "response_format", "n")
    nulls = params_of(completion(**dict.fromkeys(fields)))
    assert nulls.seed != seed
    assert nulls == SamplingParams(seed=nulls.seed, max_tokens=8192)


@pytest.mark.parametrize("make", [completion, chat])
def test_harmless_fields_change_nothing(make: Any) -> None:
    request = make(**HARMLESS, max_tokens=2, seed=1)
    assert params_of(request) == SamplingParams(max_tokens=2, seed=1)
    assert request.model is None
    assert not request.returns_token_ids


REFUSED = [
    ("both", {"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ("both", {"temprature": None}, "temprature", "unknown field"),
    ("both", {"stream": True}, "stream", "stream=True: is not supported here"),
    ("both", {"stream": 0}, "stream", "not supported"),
    ("both", {"stream_options": {"include_usage": True}}, "stream_options", "not supported"),
    ("both", {"temperature": "hot"}, "temperature", "must be a number"),
    ("both", {"temperature": True}, "temperature", "must be a number"),
    ("both", {"temperature": -1}, "temperature", "must be a finite number"),
    ("both", {"max_tokens": 0}, "max_tokens", "integer in [1"),
    ("both", {"n": 0}, "n", "integer in [1"),
    ("both", {"n": 2049}, "n", "more than 2048"),
    ("both", {"n": 2, "temperature": 0}, "n", "greedy"),
    ("both", {"seed": 2**64}, "seed", "integer"),
    ("both", {"detokenize": False}, "detokenize", "not supported"),
    ("both", {"stop": [""]}, "stop", "non-empty"),
    ("both", {"model": 5}, "model", "string"),
    ("both", {"return_token_ids": "yes"}, "return_token_ids", "true or false"),
    ("chat", {"messages": None}, "messages", "list of messages"),
    ("chat", {"logprobs": 2}, "logprobs", "true or false"),
    ("chat", {"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "logprobs", "[0, 20]"),
    ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "contradicts max_tokens=3"),
    ("chat", {"tools": "add"}, "tools", "list of function tools"),
    ("chat", {"tool_choice": "required"}, "tool_choice", "no meaning without tools"),
    ("chat", {"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice", "must be auto, none, required"),
    (
        "chat",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "must name one",
    ),
    ("chat", {"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "no room for tool calls"),
    ("both", {"response_format": {"type": "json"}}, "response_format", "type must be"),
    ("both", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "type must be"),
    ("chat", {"thinking": True}, "thinking", 'must be {"type": "enabled"}'),
    ("chat", {"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "thinking and reasoning_effort", "contradict"),
    ("chat", {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "must be"),
    ("chat", {"functions": [{}]}, "functions", "not supported"),
    ("chat", {"audio": {"voice": "x"}}, "audio", "not supported"),
    ("chat", {"prompt": "Hi"}, "prompt", "unknown field"),
    ("chat", {"echo": True}, "echo", "not supported"),
    ("completion", {"messages": USER}, "messages", "unknown field"),
    ("completion", {"prompt": None}, "prompt", "must be a text"),
    ("completion", {"prompt": []}, "prompt", "not empty"),
    ("completion", {"prompt": ""}, "prompt", "is empty"),
    ("completion", {"prompt": ["a", 5]}, "prompt", "must be a text"),
    ("completion", {"prompt": ["a"] * 2049}, "prompt", "more than 2048"),
    ("completion", {"prompt": ["a"] * 1025, "n": 2}, "prompt", "more than 2048"),
    ("completion", {"prompt": "x" * 199}, "prompt", "has 200 tokens; max_model_len=200"),
    ("completion", {"prompt": ["a", "x" * 199]}, "prompt", "has 200 tokens"),
    ("completion", {"logprobs": True}, "logprobs", "integer"),
    ("completion", {"echo": True}, "echo", "not supported"),
    ("completion", {"suffix": "x"}, "suffix", "not supported"),
    ("completion", {"best_of": 2}, "best_of", "must equal n=1"),
    ("chat", {"best_of": 2, "n": 2}, "best_of", "not supported"),
    ("completion", {"tools": TOOLS}, "tools", "not supported"),
    ("completion", {"thinking": {"type": "enabled"}}, "thinking", "unknown field"),
    ("completion", {"x" * 10**6: 1}, "x" * 10**6, "unknown field"),
]


@pytest.mark.parametrize(("kind", "body", "parameter", "reason"), REFUSED, ids=lambda value: f"{value!r:.40}")
def test_what_cannot_be_obeyed_is_named(kind: str, body: dict, parameter: str, reason: str) -> None:
    for make in {"both": [chat, completion], "chat": [chat], "completion": [completion]}[kind]:
        with pytest.raises(AbyssalError) as caught:
            make(**body)
        assert caught.value.parameter == parameter
        assert reason in str(caught.value)
        assert len(str(caught.value)) < 400


def test_a_prompt_just_short_enough_is_taken() -> None:
    assert len(completion(prompt="x" * 198).parts[0].prompt_token_ids) == 199


def test_deep_nesting_is_refused() -> None:
    nested: Any = {}
    for _ in range(20_000):
        nested = {"a": nested}
    with pytest.raises(LineRefused, match="nested too deeply"):
        chat(metadata=nested)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["a", [7]], [[BOS, 97], [7]]),
    ],
)
def test_forms_of_prompts(prompt: Any, ids: list[list[int]]) -> None:
    assert [list(part.prompt_token_ids) for part in completion(prompt=prompt).parts] == ids


def test_default_lengths_are_those_of_generate_and_chat() -> None:
    assert params_of(completion()).max_tokens == 8192
    assert params_of(completion(min_tokens=9000)).max_tokens == 9000
    assert params_of(chat()).max_tokens == 9


@pytest.mark.parametrize(
    ("body", "thinking", "effort"),
    [
        ({}, False, None),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "none"}, False, None),
        ({"chat_template_kwargs": {"thinking": True}}, True, None),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "max"}, True, "max"),
    ],
)
def test_three_spellings_of_thinking(body: dict, thinking: bool, effort: str | None) -> None:
    engine = ScriptedEngine()
    chat(engine, **body)
    assert engine.chat.asked == [{"tools": None, "thinking": thinking, "effort": effort}]


@pytest.mark.parametrize(
    ("choice", "shown"), [({}, TOOLS), ({"tool_choice": "auto"}, TOOLS), ({"tool_choice": "none"}, None)]
)
def test_tools_are_shown_unless_none_may_be_called(choice: dict, shown: list | None) -> None:
    engine = ScriptedEngine()
    chat(engine, tools=TOOLS, **choice)
    assert engine.chat.asked[0]["tools"] == shown


NAMED = {"type": "function", "function": {"name": "add"}}
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]


@pytest.mark.parametrize(
    ("body", "choice"),
    [
        ({}, None),
        ({"tool_choice": "auto"}, None),
        ({"tools": STRICT}, "auto"),
        ({"parallel_tool_calls": False}, "auto"),
        ({"tool_choice": "none"}, "none"),
        ({"tool_choice": "required"}, "required"),
        ({"tool_choice": NAMED}, "named"),
    ],
)
def test_what_tools_constrain(body: dict, choice: str | None) -> None:
    constraint = chat(**{"tools": TOOLS, **body}).parts[0].structured
    assert (None if constraint is None else constraint.tool_choice) == choice
    assert constraint is None or constraint.parallel_tool_calls == body.get("parallel_tool_calls", True)


def test_the_format_of_an_answer_begins_behind_its_reasoning() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    plain = chat(response_format=schema, n=2)
    assert [part.structured.schema() for part in plain.parts] == [{"type": "integer"}] * 2
    assert not plain.parts[0].structured.thinking
    assert chat(response_format=schema, reasoning_effort="low").parts[0].structured.thinking
    assert completion(response_format={"type": "json_object"}).parts[0].structured.json_object
    assert completion(response_format={"type": "text"}).parts[0].structured is None


def test_no_tools_are_no_tools() -> None:
    engine = ScriptedEngine()
    chat(engine, tools=[], tool_choice="none")
    assert engine.chat.asked[0]["tools"] is None


def test_seeds_differ_by_id_content_prompt_and_job_and_by_nothing_else() -> None:
    def seeds(custom_id: str = "a", seed: int | None = None, **body: Any) -> list[int | None]:
        engine = ScriptedEngine(seed=seed)
        request = read("completions", {"prompt": ["Hi", "Hi"], **body}, engine=engine, custom_id=custom_id)
        return [part.params.seed for part in request.parts]

    base = seeds(temperature=1.0, top_p=0.5)
    assert base == seeds(top_p=0.5, temperature=1.0)
    assert base == seeds(top_p=0.5, temperature=1.0, seed=0)
    others = [base, seeds("b", top_p=0.5, temperature=1.0), seeds(top_p=0.6, temperature=1.0), seeds(seed=1)]
    assert len({seed for pair in others for seed in pair}) == 8


def test_a_seed_that_is_given_is_used_for_every_prompt() -> None:
    request = completion(prompt=["a", "b"], seed=5)
    assert [part.params.seed for part in request.parts] == [5, 5]


@pytest.mark.parametrize("seed", [{}, {"seed": 5}])
def test_several_outputs_have_seeds_of_their_own(seed: dict) -> None:
    one = completion(prompt=["a", "b"], **seed)
    three = completion(prompt=["a", "b"], n=3, best_of=3, **seed)
    assert [part.sample for part in three.parts] == [0, 1, 2, 0, 1, 2]
    assert [part.params.n for part in three.parts] == [1] * 6
    assert [list(part.prompt_token_ids) for part in three.parts] == [[BOS, 97]] * 3 + [[BOS, 98]] * 3
    seeds = [part.params.seed for part in three.parts]
    assert len(set(seeds)) == (3 if seed else 6)
    if seed:
        assert (seeds[0], seeds[3]) == (5, 5) == (one.parts[0].params.seed, one.parts[1].params.seed)
    answers = chat(n=2, **seed)
    assert [part.sample for part in answers.parts] == [0, 1]
    assert answers.parts[0].parser is not answers.parts[1].parser


def test_served_names() -> None:
    def ask(**body: Any) -> LineRequest:
        return read("completions", {"prompt": "Hi", **body}, served_names=("one", "two"))

    assert ask(model="two").model == "two"
    assert ask().model is None
    with pytest.raises(LineRefused, match="this job serves one, two") as caught:
        ask(model="three")
    assert (caught.value.status, caught.value.code, caught.value.parameter) == (404, "model_not_found", "model")


def test_without_a_tokenizer_there_are_only_ids() -> None:
    engine = ScriptedEngine()
    engine.tokenizer = engine.chat = None
    assert read("completions", {"prompt": [5]}, engine=engine).parts[0].prompt_token_ids == [5]
    with pytest.raises(InvalidRequest, match="has no tokenizer"):
        read("completions", {"prompt": "Hi"}, engine=engine)
    with pytest.raises(InvalidRequest, match=r"needs a tokenizer\.json"):
        chat(engine)
