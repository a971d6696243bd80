"""`abyssal batch` with a scripted engine in place of a model. On leaving it, it writes which requests were begun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from scripted import ScriptedEngine

import abyssal.llm
from abyssal.cli.main import main


class ScriptedLLM(ScriptedEngine):
    """Takes the settings of an LLM."""

    def __init__(self, model: str, *, revision: str | None, assume_yes: bool) -> None:
        super().__init__(max_num_seqs=3, step_seconds=0.002)
        engines.append(self)


if __name__ == "__main__":
    os.fsync = lambda fd: None
    engines: list[ScriptedLLM] = []
    abyssal.llm.LLM = ScriptedLLM
    status = main(["batch", *sys.argv[2:], "--model", "toy/model"])
    Path(sys.argv[1]).write_text(json.dumps(engines[0].begun if engines else None))
    sys.exit(status)
