"""Runs one job in child processes that are killed, and looks at the files after every kill. Prints what it saw as JSON.

A program of its own, so that what is forked is small and has one thread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from scripted import ScriptedEngine

from abyssal.batch import run_batch

NUM_LINES = 2000
STEP_SECONDS = 0.002


def input_lines() -> list[str]:
    """Completions and chats of different lengths, and every tenth line no request."""
    rng = random.Random(3)
    lines = []
    for number in range(NUM_LINES):
        body: dict = {"max_tokens": rng.choice([1, 2, 3, 8]), "logprobs": 1}
        url = "/v1/completions"
        if number % 3:
            body["prompt"] = f"prompt {number}" * rng.choice([1, 1, 10])
        else:
            url, body["logprobs"] = "/v1/chat/completions", True
            body["messages"] = [{"role": "user", "content": f"question {number}"}]
        line = json.dumps({"custom_id": f"id {number}", "method": "POST", "url": url, "body": body})
        lines.append(line[: len(line) // 2] if number % 10 == 9 else line)
    return lines


def run(folder: Path, name: str, options: dict) -> None:
    """Run, or go on with, the job."""
    time.time = lambda: 1.8e9
    if options.get("error_file"):
        options = {"error_path": folder / f"{name}.errors.jsonl"}
    engine = ScriptedEngine(max_num_seqs=8, step_seconds=STEP_SECONDS)
    run_batch(engine, folder / "in.jsonl", folder / f"{name}.jsonl", model_name="toy", **options)


def die_in_a_write(rng: random.Random) -> None:
    """Have this process killed by itself in the middle of one of its next writes."""
    real, countdown, share = os.write, rng.randrange(40), rng.random()

    def write(fd: int, data: bytes) -> int:
        nonlocal countdown
        countdown -= 1
        if countdown < 0:
            real(fd, data[: int(share * len(data))])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, data)

    os.write = write


def in_a_child(work: Callable[[], None]) -> int:
    """Fork; the child works and exits."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    return child


def whole_lines(path: Path) -> bytes:
    """The file up to its last newline."""
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def main(folder: Path, num_kills: int, seed: int, options: dict) -> None:
    """Kill `num_kills` times, then let it end."""
    os.fsync = lambda fd: None
    rng = random.Random(seed)
    (folder / "in.jsonl").write_text("\n".join(input_lines()))
    files = [folder / "killed.jsonl", *([folder / "killed.errors.jsonl"] if options.get("error_file") else [])]
    torn, counts, before = 0, [], [b"" for _ in files]
    for attempt in range(num_kills):

        def work(attempt: int = attempt) -> None:
            if attempt % 2:
                die_in_a_write(random.Random(seed * 1000 + attempt))
            run(folder, "killed", options)

        child = in_a_child(work)
        if attempt % 2 == 0:
            time.sleep(rng.uniform(0.0, 0.06))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"attempt {attempt} ended by itself: the job is too small, or it failed"
        after = [whole_lines(path) for path in files]
        assert all(new.startswith(old) for new, old in zip(after, before, strict=True)), "a finished line was touched"
        torn += any(path.exists() and whole_lines(path) != path.read_bytes() for path in files)
        counts.append(sum(content.count(b"\n") for content in after))
        before = after
    for name in ("killed", "whole"):
        _, status = os.waitpid(in_a_child(lambda name=name: run(folder, name, options)), 0)
        assert status == 0, f"the last run of {name!r} failed"
    print(json.dumps({"torn": torn, "counts": counts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
