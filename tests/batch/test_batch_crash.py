"""kill -9 at any moment: each line is answered exactly once, and as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def numbers_of(path: Path) -> list[int]:
    return [int(json.loads(line)["id"][len("batch_req_") :][:10], 16) for line in path.read_bytes().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_kills", "options"),
    [(50, {}), (20, {"ordered": True}), (20, {"error_file": True})],
    ids=["50", "ordered", "two files"],
)
def test_killed_at_random_moments(num_kills: int, options: dict, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "crash_loop.py"), str(tmp_path), str(num_kills), "7", json.dumps(options)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen["counts"]) == num_kills
    assert seen["torn"] >= num_kills // 4, "the kills hit no write; the test shows little"
    assert len(set(seen["counts"])) >= num_kills // 3, "the job did not get on between the kills; the test shows little"
    numbers: list[int] = []
    for suffix in [".jsonl", ".errors.jsonl"] if options.get("error_file") else [".jsonl"]:
        killed, whole = ((tmp_path / (name + suffix)).read_bytes() for name in ("killed", "whole"))
        assert sorted(killed.splitlines()) == sorted(whole.splitlines())
        numbers += numbers_of(tmp_path / ("killed" + suffix))
        if options.get("ordered"):
            assert killed == whole
    assert sorted(numbers) == list(range(1, 2001))


@pytest.mark.slow
def test_the_model_killed_at_random_moments(checkpoint_of, tmp_path: Path) -> None:
    rng = random.Random(11)
    lines = []
    for number in range(24):
        body = {"max_tokens": 12 + number % 5, "logprobs": 1, "prompt": f"The cat {number}", "ignore_eos": True}
        lines.append(json.dumps({"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}))
    (tmp_path / "in.jsonl").write_text("\n".join(lines))

    def start(name: str) -> subprocess.Popen:
        files = [str(tmp_path / "in.jsonl"), str(tmp_path / f"{name}.jsonl")]
        settings = ["--model", str(checkpoint_of("micro")), "--max-num-seqs", "2", "--num-threads", "1"]
        command = [sys.executable, "-m", "abyssal", "batch", *files, *settings]
        return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    output, before = tmp_path / "killed.jsonl", b""
    for _ in range(3):
        process = start("killed")
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and output_size(output) <= len(before):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"it ended by itself: {errors.decode()}"
        content = output.read_bytes()
        assert content.startswith(before)
        before = content[: content.rfind(b"\n") + 1]
        assert 0 < before.count(b"\n") < len(lines)
    for name in ("killed", "whole"):
        process = start(name)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    # Without the native kernels a logarithm may differ in its last bit from one batch to another.
    is_exact = json.loads((tmp_path / "whole.jsonl.journal").read_text())["facts"]["backend"] == "native"
    answers = {}
    for name in ("killed", "whole"):
        records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_bytes().splitlines()]
        for record in records:
            assert record["response"]["body"].pop("created") > 1_700_000_000
            if not is_exact:
                del record["response"]["body"]["choices"][0]["logprobs"]
        answers[name] = sorted(json.dumps(record) for record in records)
    assert len(answers["killed"]) == len(lines)
    assert answers["killed"] == answers["whole"]


def output_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
