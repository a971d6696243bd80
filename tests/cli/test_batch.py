"""`abyssal batch`: on the micro checkpoint against the Python API, and interrupted with a scripted engine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from abyssal import LLM, SamplingParams
from abyssal.batch import BatchProgress
from abyssal.cli.batch import figures_of
from abyssal.cli.main import main

ROOT = Path(__file__).parents[2]
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="module")
def micro(checkpoint_of) -> str:
    return str(checkpoint_of("micro"))


def line(custom_id: str, url: str = "completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body})


def write(folder: Path, *lines: str) -> list[str]:
    """The arguments of input and output."""
    (folder / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return ["batch", str(folder / "in.jsonl"), str(folder / "out.jsonl")]


def records_of(folder: Path) -> list[dict[str, Any]]:
    content = (folder / "out.jsonl").read_bytes()
    assert content == b"" or content.endswith(b"\n")
    return [json.loads(answer) for answer in content.decode().split("\n")[:-1]]


def choices_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {r["custom_id"]: r["response"]["body"]["choices"] for r in records_of(folder) if r["error"] is None}


def test_answers_are_those_of_the_python_api(micro: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 6}
    command = write(
        tmp_path,
        line("greedy", prompt="The cat sat", temperature=0, max_tokens=6, logprobs=2),
        line("sampled", prompt=["The cat sat", "模型"], **sampled),
        line("chat", "chat/completions", messages=USER, **sampled, logprobs=True, top_logprobs=2),
        line("thinking", "chat/completions", messages=USER, **sampled, reasoning_effort="low"),
        line("stopped", prompt="The cat sat", temperature=0, max_tokens=6, stop_token_ids=[385]),
    )
    assert main([*command, "--model", micro]) == 0
    assert capsys.readouterr().out == ""
    choices = choices_of(tmp_path)
    with LLM(micro) as llm:
        params = SamplingParams(**sampled)
        greedy = llm.generate("The cat sat", SamplingParams(temperature=0, max_tokens=6, logprobs=2), use_tqdm=False)[0]
        pair = llm.generate(["The cat sat", "模型"], params, use_tqdm=False)
        chat = llm.chat(USER, SamplingParams(**sampled, logprobs=2), use_tqdm=False)[0].outputs[0]
        thinking = llm.chat(USER, params, thinking=True, effort="low", use_tqdm=False)[0].outputs[0]
        tokenizer = llm.get_tokenizer()
    assert choices["greedy"][0]["text"] == greedy.outputs[0].text
    told = choices["greedy"][0]["logprobs"]
    assert told["token_logprobs"] == pytest.approx([entry.logprob for entry in greedy.outputs[0].logprobs], abs=1e-5)
    for top, entry in zip(told["top_logprobs"], greedy.outputs[0].logprobs, strict=True):
        assert list(top.values()) == pytest.approx([logprob for _, logprob in entry.top], abs=1e-5)
    assert [choice["text"] for choice in choices["sampled"]] == [output.outputs[0].text for output in pair]
    assert choices["chat"][0]["message"]["content"] == chat.text
    content = choices["chat"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx([entry.logprob for entry in chat.logprobs], abs=1e-5)
    assert [entry["bytes"] for entry in content] == [list(tokenizer.token_bytes(i)) for i in chat.token_ids]
    assert choices["thinking"][0]["message"]["reasoning_content"] == thinking.reasoning
    assert choices["stopped"][0]["finish_reason"] == "stop"
    assert choices["stopped"][0]["stop_reason"] == greedy.outputs[0].token_ids[2] == 385


def test_status_and_messages(micro: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = line("long", "chat/completions", messages=[{"role": "user", "content": "x" * 500}])
    command = [*write(tmp_path, line("a", prompt="x", max_tokens=2), "", long), "--model", micro, "--max-model-len", "64"]
    assert main(command) == 1
    shown = capsys.readouterr().err
    assert "abyssal batch: done: 2 of 2 lines are answered, 1 of them by an error; 2 in this run" in shown
    refused = next(record for record in records_of(tmp_path) if record["custom_id"] == "long")
    assert refused["response"]["status_code"] == 400
    assert refused["error"]["code"] == "context_length_exceeded"
    assert "max_model_len=64" in refused["error"]["message"]
    before = (tmp_path / "out.jsonl").read_bytes()
    assert main(command) == 1
    assert "nothing to do: all 2 lines" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert main([*command[:-1], "63"]) == 2
    shown = capsys.readouterr().err
    assert "max_model_len: 64 then, 63 now" in shown
    assert "--restart" in shown
    assert main([*command[:-1], "63", "--restart"]) == 1
    assert (tmp_path / "out.jsonl").read_bytes() != before


def test_another_model_is_refused_before_it_is_loaded(
    micro: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = write(tmp_path, line("a", prompt="x", max_tokens=2))
    assert main([*command, "--model", micro]) == 0
    monkeypatch.setattr(LLM, "__init__", None)
    copy = tmp_path / "micro"
    copy.mkdir()
    (copy / "config.json").write_text("{}")
    assert main([*command, "--model", str(copy)]) == 2
    assert "model_files" in capsys.readouterr().err
    assert main([*command, "--model", "some/model"]) == 2
    assert "model: 'micro' then, 'some/model' now" in capsys.readouterr().err


def test_order_error_file_and_served_names(micro: str, tmp_path: Path) -> None:
    names = ["--served-model-name", "small", "--served-model-name", "other"]
    command = write(
        tmp_path,
        line("a", prompt="x", max_tokens=9),
        line("b", prompt="x", max_tokens=1, model="other"),
        line("c", prompt="x", max_tokens=1, model="third"),
    )
    errors = tmp_path / "errors.jsonl"
    assert main([*command, "--model", micro, "--ordered", "--error-file", str(errors), *names]) == 1
    assert [(r["custom_id"], r["response"]["body"]["model"]) for r in records_of(tmp_path)] == [
        ("a", "small"),
        ("b", "other"),
    ]
    (refused,) = map(json.loads, errors.read_text().splitlines())
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("c", 404)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no.jsonl", "out.jsonl"], "no.jsonl: No such file or directory"),
        (["in.jsonl", "no/out.jsonl"], "no/out.jsonl: No such file or directory"),
        (["in.jsonl", "in.jsonl"], "cannot serve twice"),
        (["in.jsonl", "/dev/null"], "is no regular file"),
        ([".", "out.jsonl"], "is no regular file"),
        (["in.jsonl", "out.jsonl", "--numerics", "none"], "numerics='none'"),
    ],
)
def test_files_that_cannot_be_used(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("")
    assert main(["batch", *arguments, "--model", "x/y"]) == 2
    assert reason in capsys.readouterr().err
    assert Path("in.jsonl").read_text() == ""


def test_without_a_model_it_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(write(tmp_path)) == 2
    assert "no model given" in capsys.readouterr().err


class Child:
    """The command in a process of its own, with a scripted engine."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._begun = folder / "begun.json"
        self.output = folder / "out.jsonl"
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "batch")])
        script = [sys.executable, str(ROOT / "tests" / "batch" / "interrupted.py"), str(self._begun)]
        files = [str(folder / "in.jsonl"), str(self.output)]
        self.process = subprocess.Popen(
            [*script, *files, *arguments], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
        )

    def wait_for_answers(self, number: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.output.exists() and self.output.read_bytes().count(b"\n") >= number:
                return
            time.sleep(0.005)
        raise AssertionError(f"it ended, or nothing came: {self.process.communicate()[1]}")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit status and what it said."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    @property
    def begun(self) -> list[int]:
        """Numbers of the lines whose requests were computed."""
        return [int(request_id.split("-")[1]) for request_id in json.loads(self._begun.read_text())]


@pytest.mark.parametrize("arguments", [[], ["--ordered"]])
def test_an_interrupt_finishes_what_runs(arguments: list[str], tmp_path: Path) -> None:
    write(tmp_path, *(line(f"{i}", prompt=f"p{i}", max_tokens=5 + i % 30) for i in range(100)))
    child = Child(tmp_path, *arguments)
    child.wait_for_answers(4)
    child.interrupt()
    status, errors = child.end()
    assert status == 130, errors
    assert "finishing the 3 that run; Ctrl-C again stops at once" in errors
    assert "interrupted; the same command goes on: " in errors
    answered = [int(record["custom_id"]) + 1 for record in records_of(tmp_path)]
    assert 4 <= len(answered) < 100
    assert sorted(answered) == sorted(child.begun)
    before = child.output.read_bytes()
    again = Child(tmp_path, *arguments)
    status, errors = again.end()
    assert status == 0, errors
    assert f"going on: {len(answered)} of 100 lines are answered" in errors
    assert child.output.read_bytes().startswith(before)
    assert set(again.begun).isdisjoint(answered)
    assert sorted(int(record["custom_id"]) for record in records_of(tmp_path)) == list(range(100))


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    write(tmp_path, *(line(f"{i}", prompt=f"p{i}", max_tokens=2 if i < 10 else 10**6) for i in range(30)))
    child = Child(tmp_path)
    child.wait_for_answers(10)
    child.interrupt()
    time.sleep(0.3)
    assert child.process.poll() is None, "what ran would have taken an hour"
    child.interrupt()
    status, errors = child.end()
    assert status == 130, errors
    assert "Traceback" not in errors
    assert sorted(int(record["custom_id"]) for record in records_of(tmp_path)) == list(range(10))


def snapshot(**changes: Any) -> BatchProgress:
    values = {"total": 100, "done": 20, "resumed": 10, "failed": 0, "tokens_in": 1000, "tokens_out": 500, "running": 3}
    values |= {"waiting": 4, "hit_rate": None, "elapsed": 20.0, "is_stopping": False}
    return BatchProgress(**{**values, **changes})


def test_figures() -> None:
    now = snapshot(done=30, tokens_in=31_000, tokens_out=2500, elapsed=40.0)
    assert figures_of(snapshot(), now) == "in 1,500 out 100 tok/s  running 3  waiting 4  ETA 0:02:20"
    other = snapshot(done=10, hit_rate=0.456, failed=2)
    assert figures_of(other, other) == "in 0 out 0 tok/s  running 3  waiting 4  hits 46%  failed 2  ETA -"
    assert figures_of(now, snapshot(is_stopping=True)) == "finishing the 7 that run; Ctrl-C again stops at once"
