"""Every field of every kind of answer."""

import json
import math
import re
from pathlib import Path

import pytest
from scripted import BOS, ByteTokenizer, ScriptedEngine, text_of, token

from abyssal.batch.logprobs import completion_logprobs
from abyssal.core.batch import TokenLogprobs

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
UNIQUE = r"[0-9a-f]{24}"


def unwrapped(record: dict, status: int) -> dict:
    """Check an answer's envelope and return the body."""
    assert list(record) == ["id", "custom_id", "response", "error"]
    assert re.fullmatch(f"batch_req_{UNIQUE}", record["id"])
    response = record["response"]
    assert list(response) == ["status_code", "request_id", "body"]
    assert response["status_code"] == status
    assert response["request_id"] == record["id"].replace("batch_req_", "req_")
    return response["body"]


def check_common(body: dict, kind: str, prefix: str) -> None:
    assert re.fullmatch(prefix + UNIQUE, body["id"])
    assert body["object"] == kind
    assert isinstance(body["created"], int)
    assert body["created"] > 1_700_000_000
    assert body["model"] == "toy"
    assert re.fullmatch(r"fp_[0-9a-f]{14}", body["system_fingerprint"])
    usage = body["usage"]
    assert list(usage) == ["prompt_tokens", "completion_tokens", "total_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_completion(job, completion) -> None:
    job.write([completion("a", "Hi", seed=4, max_tokens=3)]).run()
    (record,) = job.records()
    assert record["custom_id"] == "a"
    assert record["error"] is None
    body = unwrapped(record, 200)
    check_common(body, "text_completion", "cmpl-")
    assert list(body) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    text = text_of("Hi", 4, 3)
    assert body["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}]


def test_completion_of_several_prompts(job, completion) -> None:
    job.write([completion("a", ["Hi", [5, 6], "you"], seed=4, max_tokens=2, return_token_ids=True)]).run()
    body = unwrapped(job.records()[0], 200)
    assert body["usage"] == {"prompt_tokens": 3 + 2 + 4, "completion_tokens": 6, "total_tokens": 15}
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in body["choices"]][::2] == [text_of("Hi", 4, 2), text_of("you", 4, 2)]
    ids = [[0, 72, 105], [5, 6], [0, 121, 111, 117]]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == ids
    assert [choice["token_ids"] for choice in body["choices"]] == [[token(p, 4, 0), token(p, 4, 1)] for p in ids]


@pytest.mark.parametrize("url", ["completion", "chat"])
def test_several_outputs_of_a_prompt(job, completion, chat, url: str) -> None:
    job.write([(completion if url == "completion" else chat)("a", "Hi", seed=4, max_tokens=3, n=3)]).run()
    body = unwrapped(job.records()[0], 200)
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    texts = [c["text"] if url == "completion" else c["message"]["content"] for c in body["choices"]]
    assert texts[0] == text_of("Hi", 4, 3)
    assert len(set(texts)) == 3


def test_chat(job, chat) -> None:
    job.write([chat("a", "Hi", seed=4, max_tokens=3)]).run(ScriptedEngine(stop_after=2))
    body = unwrapped(job.records()[0], 200)
    check_common(body, "chat.completion", "chatcmpl-")
    assert list(body) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    message = {"role": "assistant", "content": text_of("Hi", 4, 2), "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert body["choices"] == [choice]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_chat_that_thinks(job, chat) -> None:
    job.write([chat("a", "Hi", seed=4, max_tokens=3, reasoning_effort="low")]).run()
    (choice,) = unwrapped(job.records()[0], 200)["choices"]
    text = text_of("Hi", 4, 3)
    assert choice["message"] == {
        "role": "assistant",
        "content": text[1:],
        "reasoning_content": text[:1],
        "refusal": None,
    }


@pytest.mark.parametrize(("stop_after", "reason"), [(1, "tool_calls"), (9, "length")])
def test_tool_calls_have_ids_that_do_not_change(new_job, chat, stop_after: int, reason: str) -> None:
    calls = []
    for name in ("one", "two"):
        job = new_job(name).write([chat("a", seed=4, tools=TOOLS, max_tokens=3)])
        job.run(ScriptedEngine(stop_after=stop_after))
        (choice,) = unwrapped(job.records()[0], 200)["choices"]
        assert choice["finish_reason"] == reason
        assert list(choice["message"]) == ["role", "content", "tool_calls", "refusal"]
        assert choice["message"]["content"] is None
        calls += choice["message"]["tool_calls"]
    assert calls[0] == calls[1]
    assert re.fullmatch(f"call_{UNIQUE}", calls[0].pop("id"))
    assert calls[0] == {"type": "function", "function": {"name": "add", "arguments": "{}"}}


def logprob(token_id: int) -> float:
    """What the scripted engine says of the token that was drawn."""
    return -9999.0 if token_id % 7 == 0 else -token_id / 8


def test_logprobs_of_chat(job, chat) -> None:
    job.write([chat("a", "Hi", seed=4, max_tokens=5, logprobs=True, top_logprobs=2)]).run()
    (choice,) = unwrapped(job.records()[0], 200)["choices"]
    ids = [token([0, 72, 105], 4, i) for i in range(5)]
    top = [{"token": "!", "logprob": -1.0, "bytes": [33]}, {"token": '"', "logprob": -2.0, "bytes": [34]}]
    assert choice["logprobs"] == {
        "content": [{"token": chr(i), "logprob": logprob(i), "bytes": [i], "top_logprobs": top} for i in ids],
        "refusal": None,
    }


def test_logprobs_of_completions(job, completion) -> None:
    job.write([completion("a", "Hi", seed=4, max_tokens=5, logprobs=1, prompt_logprobs=1)]).run()
    (choice,) = unwrapped(job.records()[0], 200)["choices"]
    ids = [token([0, 72, 105], 4, i) for i in range(5)]
    assert choice["logprobs"] == {
        "tokens": [chr(i) for i in ids],
        "token_logprobs": [logprob(i) for i in ids],
        "top_logprobs": [{"!": -1.0}] * 5,
        "text_offset": [0, 1, 2, 3, 4],
    }
    most_likely = {"33": {"logprob": -1.0, "rank": 1, "decoded_token": "!"}}
    own = [{str(i): {"logprob": logprob(i), "rank": 3, "decoded_token": chr(i)}} for i in (72, 105)]
    assert choice["prompt_logprobs"] == [None, {**most_likely, **own[0]}, {**most_likely, **own[1]}]


def test_offsets_count_characters_and_parts_of_characters_are_named_by_their_bytes() -> None:
    ids = [BOS, *"aé模".encode(), 0xFF, ord("b")]
    entries = [TokenLogprobs(i, -1.0, 1, ((i, -1.0),)) for i in ids]
    told = completion_logprobs(entries, ByteTokenizer(Path()), skip_special_tokens=True)
    assert told["text_offset"] == [0, 0, 1, 1, 2, 2, 2, 3, 4]
    assert told["tokens"] == ["\0", "a", *(f"bytes:\\x{b:02x}" for b in [*"é模".encode(), 0xFF]), "b"]
    assert told["top_logprobs"] == [{name: -1.0} for name in told["tokens"]]
    assert completion_logprobs(entries, ByteTokenizer(Path()), skip_special_tokens=False)["text_offset"][1] == 1


def test_minus_infinity_is_a_number(job, completion) -> None:
    """JSON has no infinities, and an answer must be JSON."""
    job.write([completion(str(seed), seed=seed, max_tokens=20, logprobs=0) for seed in range(5)]).run()
    values = [p for r in job.records() for p in r["response"]["body"]["choices"][0]["logprobs"]["token_logprobs"]]
    assert -9999.0 in values
    assert all(map(math.isfinite, values))


def test_a_line_that_is_no_request(job, completion) -> None:
    job.write([completion("first"), "{nope", '{"custom_id": "b", "method": "GET"}']).run()
    assert job.records()[0] == {
        "id": job.records()[0]["id"],
        "custom_id": None,
        "response": None,
        "error": {
            "code": "invalid_json",
            "message": "line 2 is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
            "param": None,
            "line": 2,
        },
    }
    second = job.records()[1]
    assert (second["custom_id"], second["response"]) == ("b", None)
    assert second["error"] == {
        "code": "unsupported_method",
        "message": "method='GET': must be 'POST'",
        "param": "method",
        "line": 3,
    }


@pytest.mark.parametrize(
    ("body", "status", "code", "parameter", "kind"),
    [
        ({"temperature": -1}, 400, "invalid_value", "temperature", "invalid_request_error"),
        ({"temprature": 1}, 400, "unknown_field", "temprature", "invalid_request_error"),
        ({"prompt": "x" * 500}, 400, "context_length_exceeded", "prompt", "invalid_request_error"),
        ({"prompt": [255]}, 400, "invalid_value", "prompt", "invalid_request_error"),
        ({"prompt": "fails!"}, 500, "server_error", None, "server_error"),
        ({"prompt": ["fine", "fails!", "fine"]}, 500, "server_error", None, "server_error"),
        ({"prompt": [[5], [255]]}, 400, "invalid_value", "prompt", "invalid_request_error"),
    ],
)
def test_a_request_that_is_refused_or_fails(job, completion, body, status, code, parameter, kind) -> None:
    progress = job.write([completion("a", **body), completion("b")]).run()
    records = job.by_id()
    told = unwrapped(records["a"], status)
    assert list(told) == ["error"]
    assert told["error"]["type"] == kind
    assert (told["error"]["code"], told["error"]["param"]) == (code, parameter)
    assert records["a"]["error"] == {
        "code": code,
        "message": told["error"]["message"],
        "param": parameter,
        "line": 1,
    }
    assert unwrapped(records["b"], 200)
    assert (progress.done, progress.failed) == (2, 1)


def test_every_reader_finds_one_line(job, completion) -> None:
    """Some readers split text at more than newlines; and half of a surrogate pair is an id that UTF-8 cannot spell."""
    names = ["a\u2028b\u2029c\x85d\x0be\x1cf", "模型", "\\ud800"]
    job.write([completion(names[0]), completion(names[1]), completion("x").replace('"x"', '"\\ud800"')]).run()
    content = job.output.read_text(encoding="utf-8")
    assert len(content.splitlines()) == 3
    assert "模型" in content
    assert {json.loads(line)["custom_id"] for line in content.splitlines()} == {names[0], names[1], "\ud800"}


def test_a_line_that_breaks_our_code_is_an_answer_too(job, completion, monkeypatch, caplog) -> None:
    engine = ScriptedEngine()
    real = engine.tokenizer.encode

    def encode(text: str) -> list[int]:
        if text == "poison":
            raise ZeroDivisionError("oh")
        return real(text)

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    job.write([completion("a", "poison"), completion("b")]).run(engine)
    records = job.by_id()
    assert unwrapped(records["a"], 500)["error"]["message"] == "ZeroDivisionError: oh"
    assert records["b"]["error"] is None
    assert "line 1 could not be read" in caplog.text
