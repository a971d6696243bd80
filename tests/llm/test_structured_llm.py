"""Constrained output through LLM, batch files and the command line, on the `micro` checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from abyssal import LLM, SamplingParams, StructuredOutput
from abyssal.batch.job import run_batch
from abyssal.cli.main import main
from abyssal.core.errors import InvalidRequest

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, TIME]
USER = [{"role": "user", "content": "Weather?"}]
SETTINGS = {"num_threads": 1, "num_blocks": 48, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def micro(checkpoint_of) -> Path:
    return checkpoint_of("micro")


@pytest.fixture(scope="module", params=["off", 3])
def llm(micro: Path, request) -> Iterator[LLM]:
    with LLM(micro, speculation=request.param, **SETTINGS) as llm:
        yield llm


def params(seed: int = 1, **changes) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 300, **changes})


def check_call(call: dict, names: tuple[str, ...]) -> None:
    function = call["function"]
    assert function["name"] in names
    arguments = json.loads(function["arguments"])
    jsonschema.validate(arguments, SCHEMA if function["name"] == "get_weather" else {"type": "object", "maxProperties": 0})


def test_one_constraint_for_all_prompts(llm: LLM) -> None:
    outputs = llm.generate(["a", "b", "c"], params(), structured=StructuredOutput(json=SCHEMA), use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)


def test_one_constraint_for_each_prompt(llm: LLM) -> None:
    constraints = [StructuredOutput(regex="[0-9]{4}"), None, StructuredOutput(choice=["up", "down"])]
    first, free, last = llm.generate(["a", "b", "c"], params(max_tokens=20), structured=constraints, use_tqdm=False)
    (same,) = llm.generate(["b"], params(max_tokens=20), use_tqdm=False)
    assert re.fullmatch("[0-9]{4}", first.outputs[0].text)
    assert free.outputs[0].token_ids == same.outputs[0].token_ids
    assert last.outputs[0].text in ("up", "down")
    with pytest.raises(InvalidRequest, match="one for each of 1 requests"):
        llm.generate(["b"], structured=constraints, use_tqdm=False)


def test_a_refused_constraint_fails_its_prompt_alone(llm: LLM) -> None:
    bad = StructuredOutput(json={"type": "object", "properties": {"a": {"not": {}}}})
    refused, served = llm.generate(["a", "b"], params(), structured=[bad, StructuredOutput(choice=["x"])], use_tqdm=False)
    assert "$.properties.a.not: is not enforced" in refused.error
    assert refused.outputs[0].finish_reason == "error"
    assert served.outputs[0].text == "x"


def test_response_format(llm: LLM) -> None:
    (output,) = llm.chat(USER, params(), response_format=FORMAT, use_tqdm=False)
    jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)
    (output,) = llm.chat(USER, params(), structured=StructuredOutput(regex="ok|no"), use_tqdm=False)
    assert output.outputs[0].text in ("ok", "no")


@pytest.mark.parametrize("seed", range(3))
def test_required_calls(llm: LLM, seed: int) -> None:
    (output,) = llm.chat(USER, params(seed), tools=TOOLS, tool_choice="required", use_tqdm=False)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.text == ""
    assert completion.tool_calls
    for call in completion.tool_calls:
        check_call(call, ("get_weather", "get_time"))


def test_a_named_call(llm: LLM) -> None:
    choice = {"type": "function", "function": {"name": "get_time"}}
    (output,) = llm.chat(USER, params(), tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, use_tqdm=False)
    (call,) = output.outputs[0].tool_calls
    check_call(call, ("get_time",))


def test_strict_calls_that_are_optional(llm: LLM) -> None:
    """A model that likes to open calls: what it calls satisfies the schema, and nothing follows the block."""
    tokenizer = llm.get_tokenizer()
    likes = {tokenizer.token_id("｜DSML｜"): 60, tokenizer.encode("<", add_bos=False)[0]: 30}
    newline = tokenizer.encode("\n", add_bos=False)[0]
    schema = {**SCHEMA, "required": ["city", "days"]}
    strict = [{"type": "function", "function": {"name": "get_weather", "parameters": schema, "strict": True}}]
    own = params(2, logit_bias={**likes, newline: 30}, max_tokens=400)
    (output,) = llm.chat(USER, own, tools=strict, parallel_tool_calls=False, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].tool_calls
    for call in output.outputs[0].tool_calls:
        check_call(call, ("get_weather",))


def test_no_calls(llm: LLM) -> None:
    marker = llm.get_tokenizer().token_id("｜DSML｜")
    own = params(logit_bias={marker: 100}, max_tokens=30)
    (output,) = llm.chat(USER, own, tools=TOOLS, tool_choice="none", use_tqdm=False)
    assert marker not in output.outputs[0].token_ids
    assert output.outputs[0].tool_calls == []


def test_calls_behind_reasoning(llm: LLM) -> None:
    end = llm.get_tokenizer().token_id("</think>")
    own = params(logit_bias={end: 9}, max_tokens=400)
    (output,) = llm.chat(USER, own, tools=TOOLS, tool_choice="required", thinking=True, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.reasoning is not None
    for call in completion.tool_calls:
        check_call(call, ("get_weather", "get_time"))
    assert completion.tool_calls


def test_what_cannot_go_together(llm: LLM) -> None:
    both = llm.chat(USER, params(), tools=TOOLS, response_format=FORMAT, use_tqdm=False)[0]
    assert "leaves no room for tool calls" in both.error
    twice = llm.chat(USER, params(), response_format=FORMAT, structured=StructuredOutput(regex="a"), use_tqdm=False)[0]
    assert "cannot be combined" in twice.error
    lone = llm.chat(USER, params(), tool_choice="required", use_tqdm=False)[0]
    assert "has no meaning without tools" in lone.error


def test_stream_under_a_constraint(llm: LLM) -> None:
    outputs = list(llm.stream("a", params(), structured=StructuredOutput(regex="[a-f]{8}")))
    assert re.fullmatch("[a-f]{8}", outputs[-1].outputs[0].text)
    assert len(outputs) > 2


def line(custom_id: str, url: str, **body) -> str:
    given = {"seed": 1, "max_tokens": 300, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": given})


def test_batch_file(llm: LLM, tmp_path: Path) -> None:
    lines = [
        line("format", "/v1/chat/completions", messages=USER, response_format=FORMAT, n=2),
        line("call", "/v1/chat/completions", messages=USER, tools=TOOLS, tool_choice="required"),
        line("free", "/v1/chat/completions", messages=USER, tools=TOOLS, max_tokens=5),
        line("text", "/v1/completions", prompt="a", response_format={"type": "json_object"}),
        line(
            "bad",
            "/v1/chat/completions",
            messages=USER,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"if": {}}}},
        ),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    progress = run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (progress.done, progress.failed) == (5, 1)
    answers = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    by_id = {answer["custom_id"]: answer for answer in answers}
    choices = by_id["format"]["response"]["body"]["choices"]
    assert len(choices) == 2
    for choice in choices:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    (choice,) = by_id["call"]["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    for call in choice["message"]["tool_calls"]:
        check_call(call, ("get_weather", "get_time"))
    assert isinstance(json.loads(by_id["text"]["response"]["body"]["choices"][0]["text"]), dict)
    assert "$.if: is not enforced" in json.dumps(by_id["bad"])


FLAGS = ["--seed", "3", "--max-tokens", "200", "--num-threads", "1", "--num-blocks", "16"]


def test_command_line(micro: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    (tmp_path / "grammar.lark").write_text('start: "(" start ")" | /[xyz]/\n', encoding="utf-8")
    call = ["generate", "--model", str(micro), *FLAGS, "hello"]
    assert main([*call, "--json-schema", str(tmp_path / "schema.json")]) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), SCHEMA)
    assert main([*call, "--regex", "[a-z]{3}-[0-9]{2}"]) == 0
    assert re.fullmatch("[a-z]{3}-[0-9]{2}\n", capsys.readouterr().out)
    assert main([*call, "--grammar", str(tmp_path / "grammar.lark"), "--json"]) == 0
    assert re.fullmatch(r"\(*[xyz]\)*", json.loads(capsys.readouterr().out)["text"])


def test_command_line_refusals(micro: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call = ["generate", "--model", str(micro), *FLAGS, "hello"]
    assert main([*call, "--regex", "a(?=b)"]) == 2
    assert "look-ahead is not supported" in capsys.readouterr().err
    assert main([*call, "--json-schema", str(tmp_path / "none.json")]) == 2
    assert "--json-schema" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([*call, "--regex", "a", "--grammar", "x"])
    assert caught.value.code == 2
