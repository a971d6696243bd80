"""The commands on the `micro` checkpoint, against the Python API and golden tensors."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from abyssal import LLM, SamplingParams
from abyssal.cli.main import main
from abyssal.ops.registry import OpTable

GREEDY = ["--temperature", "0", "--max-tokens", "6"]
PROMPTS = ["The cat sat", "模型 and 专家", "def f(x):"]


@pytest.fixture(scope="module")
def micro(checkpoint_of) -> str:
    return str(checkpoint_of("micro"))


@pytest.fixture(scope="module")
def completions(micro: str) -> list[str]:
    """What the Python API generates for the prompts."""
    with LLM(micro) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_generate_prints_the_completion(micro: str, completions: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", micro, *GREEDY, PROMPTS[0]]) == 0
    assert capsys.readouterr().out == completions[0] + "\n"


def test_generate_streams_to_a_terminal(
    micro: str, completions: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["generate", "--model", micro, *GREEDY, PROMPTS[0]]) == 0
    assert capsys.readouterr().out == completions[0] + "\n"


def test_generate_reads_stdin_and_files(
    micro: str, completions: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = "\n".join([PROMPTS[0], "", *PROMPTS[1:]])
    expected = "".join(f"[{i}] {PROMPTS[i]}\n{completions[i]}\n" for i in range(3))
    typed(monkeypatch, lines)
    assert main(["generate", "--model", micro, *GREEDY]) == 0
    assert capsys.readouterr().out == expected
    (tmp_path / "prompts.txt").write_text(lines, encoding="utf-8")
    assert main(["generate", "--model", micro, *GREEDY, "--prompt-file", str(tmp_path / "prompts.txt")]) == 0
    assert capsys.readouterr().out == expected


def test_generate_json(micro: str, completions: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", micro, *GREEDY, "--json", "--logprobs", "2", *PROMPTS]) == 0
    records = sorted(map(json.loads, capsys.readouterr().out.splitlines()), key=lambda r: r["index"])
    assert [r["prompt"] for r in records] == PROMPTS
    assert [r["text"] for r in records] == completions
    for record in records:
        assert record["finish_reason"] == "length"
        assert len(record["token_ids"]) == 6
        assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
        assert [len(entry["top"]) for entry in record["logprobs"]] == [2] * 6


def test_one_bad_prompt_does_not_stop_the_others(
    micro: str, completions: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", micro, *GREEDY, PROMPTS[0], "", PROMPTS[2]]) == 2
    captured = capsys.readouterr()
    assert captured.out == f"[0] {PROMPTS[0]}\n{completions[0]}\n[2] {PROMPTS[2]}\n{completions[2]}\n"
    assert captured.err.startswith("abyssal: error: prompt 1: prompt='': ")
    assert main(["generate", "--model", micro, *GREEDY, "--json", "", PROMPTS[0]]) == 2
    records = {r["index"]: r for r in map(json.loads, capsys.readouterr().out.splitlines())}
    assert records[0]["finish_reason"] == "error"
    assert records[0]["error"].startswith("prompt=''")
    assert records[1]["text"] == completions[0]


def test_file_that_is_no_text(micro: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(b"\xff\xfe\x00")
    assert main(["generate", "--model", micro, *GREEDY, "--prompt-file", str(tmp_path / "prompts")]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "./no/such/folder", "x"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("abyssal: error: ")
    assert "no/such/folder" in captured.err


def test_chat_over_a_pipe(micro: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "Hello\n\nAnd then?\n/reset\nHello\n/system Be brief.\nHello\n/exit\nnever read\n")
    assert main(["chat", "--model", micro, *GREEDY]) == 0
    shown = capsys.readouterr().out
    params = SamplingParams(temperature=0.0, max_tokens=6)
    hello = {"role": "user", "content": "Hello"}
    with LLM(micro) as llm:

        def answer(*messages: dict) -> str:
            return llm.chat(list(messages), params, use_tqdm=False)[0].outputs[0].text

        first = answer(hello)
        second = answer(hello, {"role": "assistant", "content": first}, {"role": "user", "content": "And then?"})
        brief = answer({"role": "system", "content": "Be brief."}, hello)
    assert shown == f"{first}\n{second}\n{first}\n{brief}\n"


def test_chat_thinking(micro: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model hardly ever ends its reasoning, so all that it says is reasoning."""
    typed(monkeypatch, "Hello\n")
    assert main(["chat", "--model", micro, *GREEDY, "--effort", "low"]) == 0
    with LLM(micro) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6)
        message = [{"role": "user", "content": "Hello"}]
        completion = llm.chat(message, params, use_tqdm=False, thinking=True, effort="low")[0].outputs[0]
    assert completion.reasoning
    assert capsys.readouterr().out == completion.reasoning + "\n"


def test_chat_goes_on_after_a_bad_message(
    micro: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "x" * 500 + "\n/unknown\nHi\n")
    assert main(["chat", "--model", micro, *GREEDY, "--max-model-len", "64"]) == 0
    captured = capsys.readouterr()
    assert "max_model_len=64" in captured.err
    assert "/reset forgets" in captured.err
    assert captured.out.count("\n") >= 1


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


@pytest.mark.parametrize("cut", [[], ["--chunk", "7"], ["--chunk", "64", "--decode-from", "100"]])
def test_logits_equal_the_golden_ones(micro: str, golden_of, cut: list[str], tmp_path: Path) -> None:
    golden = golden_of("micro")
    save_file({"input_ids": golden["input_ids"]}, tmp_path / "in.safetensors")
    files = ["--input-ids", str(tmp_path / "in.safetensors"), "--out", str(tmp_path / "out.safetensors")]
    assert main(["logits", "--model", micro, "--numerics", "exact", *files, *cut]) == 0
    logits = load_file(tmp_path / "out.safetensors")["logits"]
    assert logits.dtype == torch.float32
    assert relative_error(logits, golden["exact.logits"]) < 1e-5


def test_logits_of_ids_outside_the_vocabulary(micro: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text("[1, 99999]")
    files = ["--input-ids", str(tmp_path / "in.json"), "--out", str(tmp_path / "out")]
    assert main(["logits", "--model", micro, *files]) == 2
    assert "99999" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_logits_to_a_place_that_cannot_be_written(micro: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text("[1, 2]")
    assert main(["logits", "--model", micro, "--input-ids", str(tmp_path / "in.json"), "--out", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_bench_offline_ends_with_json(micro: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--input-len", "20", "--output-len", "3", "--concurrency", "2", "--num-prompts", "3"]
    assert main(["bench", "offline", "--model", micro, *lengths]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out.splitlines()[-1])
    for name in ("prefill_tok_s", "decode_tok_s", "ttft_ms", "tpot_ms", "peak_memory_bytes"):
        assert figures[name] > 0
    assert (figures["input_len"], figures["output_len"], figures["concurrency"], figures["num_prompts"]) == (20, 3, 2, 3)
    assert figures["numerics"] == "released"
    assert "time to first token" in captured.out
    assert "9/9" in captured.err


def test_bench_refuses_what_does_not_fit(micro: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--model", micro, "--concurrency", "4", "--num-prompts", "2"]) == 2
    assert "num_prompts=2: must be at least concurrency=4" in capsys.readouterr().err
    assert main(["bench", "offline", "--model", micro, "--input-len", "200", "--max-model-len", "128"]) == 2
    assert "max_model_len=128" in capsys.readouterr().err


def test_make_checkpoint_writes_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert main(["make-checkpoint", "--preset", "micro", "--seed", "3", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {f.name for f in folder.iterdir()}
    assert main(["make-checkpoint", str(folder)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_doctor_names_versions_and_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "torch", "--num-threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"torch            {torch.__version__}" in shown
    for name in OpTable.__dataclass_fields__:
        assert f"\n  {name} " in shown
    assert "abyssal.backends.cpu.hyper_connection." in shown
    assert "row invariance\n  start-up test  holds" in shown


def test_plan_of_the_released_model_needs_nothing_but_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "flash", "--memory", "24GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert sum(c["num_tensors"] for c in plan["weights"]) == 96_085
    assert sum(c["stored_bytes"] for c in plan["weights"]) == 510_286_023_000
    assert plan["memory_bytes"] == 24 * 2**30
    assert plan["held_as"] == "packed"
    assert plan["fits"]


def test_plan_that_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "flash", "--memory", "80GB", "--devices", "2"]) == 1
    assert "Does not fit: " in capsys.readouterr().out


def test_plan_reads_a_config_file(micro: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", f"{micro}/config.json", "--max-num-seqs", "3", "--memory", "2GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_num_seqs"] == 3


def test_inspect(micro: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--model", micro, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    index = json.loads(Path(micro, "model.safetensors.index.json").read_text())
    assert shown["num_tensors"] == len(index["weight_map"])
    assert [layer["layer"] for layer in shown["layers"]] == list(range(8))
    assert main(["inspect", "--model", micro]) == 0
    assert "compresses" in capsys.readouterr().out
