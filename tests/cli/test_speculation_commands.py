"""`abyssal calibrate` and `abyssal bench speculation` on the `micro` checkpoint, whose block is 3."""

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from abyssal.cli.bench_speculation import Point, _summary
from abyssal.cli.main import main
from abyssal.config.engine import EngineConfig
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.calibrate import collect_drafts
from abyssal.engine.engine import Engine
from abyssal.loading.calibration import CALIBRATION_FILE
from abyssal.scheduler.acceptance import sigmoid

SMALL = ["--num-threads", "1"]
TEXTS = ["--num-prompts", "9", "--output-len", "25"]


@pytest.fixture
def micro(checkpoint_of, tmp_path) -> Path:
    """A copy, so that nothing is left beside the shared one."""
    return Path(shutil.copytree(checkpoint_of("micro"), tmp_path / "micro"))


def outputs_of(folder: Path) -> list:
    engine = Engine(folder, EngineConfig(speculation=3, num_threads=1))
    for seed in range(3):
        engine.add([20, 21 + seed], SamplingParams(seed=seed, max_tokens=12, logprobs=0, ignore_eos=True, detokenize=False))
    done = []
    while engine.has_unfinished:
        done += [(o.request_id, o.outputs) for o in engine.step() if o.finished]
    return sorted(done)


def calibration_errors(drafts, temperatures):
    """Place by place and by definition: bins of a tenth of the probability that all tokens up to there are accepted."""
    for place in range(len(temperatures)):
        bins: dict[int, list[tuple[float, bool]]] = {}
        seen = [d for d in drafts if len(d.logits) > place]
        for draft in seen:
            expected = 1.0
            for logit, temperature in zip(draft.logits[: place + 1], temperatures, strict=False):
                expected *= sigmoid(logit / temperature)
            bins.setdefault(min(int(10 * expected), 9), []).append((expected, draft.num_accepted > place))
        yield len(seen), sum(abs(sum(e - o for e, o in cell)) for cell in bins.values()) / len(seen)


def test_calibrate_stores_what_was_fitted(micro, capsys):
    before = outputs_of(micro)
    assert main(["calibrate", "--model", str(micro), *SMALL, *TEXTS]) == 0
    shown = capsys.readouterr()
    path = micro / CALIBRATION_FILE
    assert shown.out.splitlines()[-1] == f"{path}: temperatures for acceptance=coupled"
    assert "9/9" in shown.err
    stored = json.loads(path.read_text())
    temperatures, figures = stored["temperatures"]["coupled"], stored["figures"]["coupled"]

    engine = Engine(micro, EngineConfig(speculation=1, num_threads=1, seed=0))
    assert engine._drafts.temperatures == tuple(temperatures)
    params = SamplingParams(temperature=1.0, max_tokens=25, detokenize=False)
    drafts = collect_drafts(engine, [[engine.model_config.bos_token_id]] * 9, params)
    for fitted, errors in ((temperatures, "error_after"), ([1.0] * 3, "error_before")):
        counts, wanted = zip(*calibration_errors(drafts, fitted), strict=True)
        assert figures["num_drafts"] == list(counts)
        assert figures[errors] == pytest.approx(wanted)
    assert figures["error_after"][0] < figures["error_before"][0]
    assert outputs_of(micro) == before


def test_calibrate_keeps_the_other_kind_of_acceptance(micro, tmp_path, capsys):
    (tmp_path / "prompts").write_text("The cat\n\nexpert 专家\n" * 5, encoding="utf-8")
    arguments = ["--prompt-file", str(tmp_path / "prompts"), "--output-len", "25", "--out", str(tmp_path / "fitted.json")]
    for acceptance in ("coupled", "rejection"):
        assert main(["calibrate", "--model", str(micro), *SMALL, *arguments, "--acceptance", acceptance]) == 0
    assert "10/10" in capsys.readouterr().err
    assert set(json.loads((tmp_path / "fitted.json").read_text())["temperatures"]) == {"coupled", "rejection"}
    assert not (micro / CALIBRATION_FILE).exists()


WRONG = {
    "no such prompts": ("calibrate --prompt-file {tmp}/none", "--prompt-file"),
    "prompts that are no text": ("calibrate --prompt-file {tmp}/bytes", "--prompt-file"),
    "no prompt": ("calibrate --prompt-file {tmp}/empty", "holds no prompt"),
    "a prompt that is too long": ("calibrate --prompt-file {tmp}/long --max-model-len 128", "max_model_len=128"),
    "too few drafts": ("calibrate --num-prompts 2 --output-len 4", "at least 100 are needed"),
    "one token each": ("calibrate --num-prompts 9 --output-len 1", "at least 100 are needed"),
    "no folder for the result": ("calibrate --out {tmp}/no/file", "does not exist"),
    "a folder as result": ("calibrate --out {tmp}", "is a folder"),
    "temperature": ("calibrate --temperature -1", "temperature=-1"),
    "another model's temperatures": ("calibrate --model {tmp}/other", "remove the file"),
    "a setting that means nothing": ("bench speculation --speculations off fast", "speculation='fast'"),
    "more than the block, at the end": ("bench speculation --speculations off 1 4", "at most 3"),
    "more than run together": ("bench speculation --concurrency 2 4 --max-num-seqs 2", "must be at least 4"),
    "no folder for the plot": ("bench speculation --plot {tmp}/no/file.svg", "does not exist"),
    "a folder as plot": ("bench speculation --plot {tmp}", "is a folder"),
    "a long prompt": ("bench speculation --input-len 200 --max-model-len 128", "max_model_len=128"),
}


@pytest.mark.parametrize(("line", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input(checkpoint_of, tmp_path, capsys, line, message):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "long").write_text("short\n" + "word " * 200)
    if "{tmp}/other" in line:
        shutil.copytree(checkpoint_of("micro"), tmp_path / "other")
        (tmp_path / "other" / CALIBRATION_FILE).write_text('{"temperatures": {"coupled": [1, 1]}}')
    words = line.format(tmp=tmp_path).split()
    words += [] if "--model" in words else ["--model", str(checkpoint_of("micro"))]
    assert main([*words, *SMALL]) == 2
    shown = capsys.readouterr()
    assert message in shown.err.splitlines()[-1]
    assert shown.out == ""
    assert not (checkpoint_of("micro") / CALIBRATION_FILE).exists()


@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "half"])
def test_shares_that_are_none(capsys, value):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "speculation", "--model", "micro", "--simulate-acceptance", value])
    assert stopped.value.code == 2
    assert f"--simulate-acceptance: must be a number between 0 and 1, not {value}" in capsys.readouterr().err


def bench(checkpoint_of, capsys, *arguments: str) -> tuple[dict, str]:
    lengths = ["--input-len", "20", "--output-len", "13"]
    assert main(["bench", "speculation", "--model", str(checkpoint_of("micro")), *SMALL, *lengths, *arguments]) == 0
    shown = capsys.readouterr().out
    return json.loads(shown.splitlines()[-1]), shown


def test_bench_compares_all_settings(checkpoint_of, tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    record, shown = bench(checkpoint_of, capsys, "--concurrency", "1", "3", "1", "--plot", str(plot))
    points = record["points"]
    settings = ["off", "1", "2", "3", "auto"]
    assert [(p["concurrency"], p["speculation"]) for p in points] == [(c, s) for c in (1, 3) for s in settings]
    for point in points:
        assert point["user_tok_s"] == pytest.approx(point["total_tok_s"] / point["concurrency"], abs=1e-3)
        assert point["total_tok_s"] > 0
        most = int(point["speculation"]) if point["speculation"].isdigit() else 3
        assert all(place["drafted"] == 0 for place in point["places"][most:])
    assert points[0]["places"] == []
    assert [p["against_off"] for p in points if p["speculation"] == "off"] == [1.0, 1.0]
    assert points[6]["against_off"] == pytest.approx(points[6]["total_tok_s"] / points[5]["total_tok_s"], abs=1e-3)
    assert (record["input_len"], record["output_len"], record["simulate_acceptance"]) == (20, 13, None)
    assert all(title in shown for title in ("Decode speed", "against off", "calibration error", "tok/s a user"))
    names = {e.text for e in ET.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}text")}
    assert set(settings) <= names


def test_the_best_run_and_the_median_against_off():
    """Speeds of three turns; while the second lasted, the machine was half as fast."""
    speeds = {"off": [100.0, 50.0, 90.0], "3": [150.0, 80.0, 153.0]}
    turns = [{name: Point(name, 2, values[i], None) for name, values in speeds.items()} for i in range(3)]
    off, three = (_summary([turn[name] for turn in turns], turns) for name in speeds)
    assert (off.total_tok_s, off.against_off) == (100.0, 1.0)
    assert (three.total_tok_s, three.user_tok_s) == (153.0, 76.5)
    assert three.against_off == pytest.approx(80 / 50)
    assert _summary([turn["3"] for turn in turns], [{"3": turn["3"]} for turn in turns]).against_off is None


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_bench_simulates_acceptance(checkpoint_of, capsys, share):
    """All or none of what is verified is accepted, with the confidence that it deserves."""
    asked = ("--speculations", "3", "--concurrency", "1", "--simulate-acceptance", str(share))
    (point,) = bench(checkpoint_of, capsys, *asked)[0]["points"]
    assert len(point["places"]) == 3
    for place in point["places"]:
        assert place["accepted"] == share * place["verified"]
        assert place["verified"] > 5
        assert place["calibration_error"] == pytest.approx(0, abs=1e-6)
