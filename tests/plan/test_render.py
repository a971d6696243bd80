"""Tables and JSON: the numbers that a user looks for are in them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from abyssal.config.engine import EngineConfig
from abyssal.config.model import ModelConfig
from abyssal.config.released import released_config
from abyssal.plan.render import print_inspect, print_plan


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plan_table_of_the_released_model(console: Console) -> None:
    plan = print_plan(released_config(), EngineConfig(), memory_bytes=141 * 10**9, num_devices=8, console=console)
    assert plan.shortfall <= 0
    text = printed(console)
    for part in ("96,085", "510 GB", "890 B per token of context", "each of 8 devices", "1,048,576", "Fits: 64 sequences"):
        assert part in text


def test_plan_that_does_not_fit_is_printed_all_the_same(console: Console) -> None:
    plan = print_plan(released_config(), EngineConfig(weights="decoded"), memory_bytes=16 * 10**9, console=console)
    assert plan.shortfall > 0
    assert "Does not fit" in printed(console)


def test_plan_json(console: Console, checkpoint_of: Callable[[str], Path]) -> None:
    model = ModelConfig.load(checkpoint_of("micro"))
    print_plan(model, EngineConfig(max_num_seqs=4), memory_bytes=8 * 10**9, as_json=True, console=console)
    (line,) = printed(console).splitlines()
    values = json.loads(line)
    assert values["fits"] is True
    assert values["bytes_per_token"] == 1.5 * 4 * (64 + 32)
    assert values["max_num_seqs"] == 4
    assert list(values["sequences_that_fit"]) == ["1024", "8192", "16384"]
    index = json.loads((checkpoint_of("micro") / "model.safetensors.index.json").read_text())
    text_and_more = sum(c["stored_bytes"] for c in values["weights"])
    # the generator stores Engram's norm weights wider than released: two layers, two weights, 4 x 256 values
    assert text_and_more == index["metadata"]["total_size"] - 2 * 2 * 4 * 256 * 2


def test_inspect_tables(console: Console) -> None:
    print_inspect(released_config(), console=console)
    lines = printed(console).splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert ["14", "2", "14", "14", "engram, compresses, selects"] in cells
    assert ["25-27", "1", "20", "24", ""] in cells
    assert ["0", "0", "-", "-", ""] in cells


def test_inspect_json(console: Console) -> None:
    print_inspect(released_config(), as_json=True, console=console)
    values = json.loads(printed(console))
    assert (values["num_tensors"], values["stored_bytes"]) == (96_085, 510_286_023_000)
    assert values["layers"][20] == {
        "layer": 20,
        "ratio": 1,
        "kv_source": 20,
        "index_source": 20,
        "roles": ["compresses", "selects", "candidate source"],
    }
