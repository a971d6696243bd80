"""Runs a small job, then a large one, and prints how much the peak of resident memory grew between, in bytes."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from scripted import ScriptedEngine

from abyssal.batch import run_batch


def write_input(path: Path, num_lines: int) -> int:
    """Lines of 300 bytes and more, every tenth one wrong; the size of the file."""
    with path.open("w") as file:
        for number in range(num_lines):
            body = {"prompt": "x" * 150, "max_tokens": 1, "temperature": -1 if number % 10 == 0 else 1, "user": "y" * 60}
            line = {"custom_id": f"request {number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path.stat().st_size


def run(folder: Path, num_lines: int, *, ordered: bool) -> None:
    """One job from beginning to end, and once more, with nothing to do."""
    write_input(folder / "in.jsonl", num_lines)
    for _ in range(2):
        engine = ScriptedEngine(max_num_seqs=64)
        engine.params = Forgetful()
        engine.begun = Forgetful()
        progress = run_batch(engine, folder / "in.jsonl", folder / "out.jsonl", model_name="toy", ordered=ordered)
        assert progress.is_complete
        assert progress.total == num_lines
    for name in ("in.jsonl", "out.jsonl", "out.jsonl.journal"):
        (folder / name).unlink()


class Forgetful(dict):
    """Takes the notes that the scripted engine keeps for other tests."""

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass


def peak() -> int:
    """Resident memory at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    os.fsync = lambda fd: None
    where, ordered = Path(sys.argv[1]), sys.argv[3] == "ordered"
    run(where, 3000, ordered=ordered)
    before = peak()
    run(where, int(sys.argv[2]), ordered=ordered)
    print(peak() - before)
