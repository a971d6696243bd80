"""Fixtures of batch jobs: inputs, runs against a scripted engine, and an independent reading of what they wrote."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from scripted import ScriptedEngine  # noqa: E402

from abyssal.batch import BatchProgress, run_batch  # noqa: E402

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def completion_line(custom_id: str, prompt: Any = "Hi", **body: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 5, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": COMPLETION, "body": body}, ensure_ascii=False)


def chat_line(custom_id: str, content: str = "Hi", **body: Any) -> str:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"messages": messages, **body}})


class Job:
    """An input and its outputs in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input, self.output, self.errors = folder / "in.jsonl", folder / "out.jsonl", folder / "errors.jsonl"
        self.journal = folder / "out.jsonl.journal"

    def write(self, lines: Iterable[str]) -> Job:
        self.input.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return self

    def run(self, engine: Any = None, **options: Any) -> BatchProgress:
        engine = engine or ScriptedEngine()
        return run_batch(engine, self.input, self.output, **{"model_name": "toy", **options})

    def records(self, path: Path | None = None) -> list[dict[str, Any]]:
        """The lines of an output, in their order; every one of them is whole."""
        content = (path or self.output).read_bytes()
        assert content == b"" or content.endswith(b"\n")
        return [json.loads(line) for line in content.decode().split("\n")[:-1]]

    def by_id(self) -> dict[str, dict[str, Any]]:
        records = self.records()
        found = {record["custom_id"]: record for record in records}
        assert len(found) == len(records)
        return found


@pytest.fixture(autouse=True)
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing here loses power, and a busy disk takes seconds to sync. The file descriptors that would be synced."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    return synced


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def new_job(tmp_path: Path) -> Callable[[str], Job]:
    def make(name: str) -> Job:
        (tmp_path / name).mkdir()
        return Job(tmp_path / name)

    return make


@pytest.fixture
def completion() -> Callable[..., str]:
    return completion_line


@pytest.fixture
def chat() -> Callable[..., str]:
    return chat_line
