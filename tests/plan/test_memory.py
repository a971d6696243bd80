"""Plans against sizes worked out by hand, and what is decided and refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from abyssal.cache.spec import CacheSpec
from abyssal.config.engine import EngineConfig
from abyssal.config.model import ModelConfig
from abyssal.config.released import released_config
from abyssal.config.topology import Topology
from abyssal.core.errors import CapacityExceeded, ConfigError
from abyssal.loading.names import expected_tensors
from abyssal.plan.machine import Machine
from abyssal.plan.memory import SPARE, MemoryPlan, decoded_bytes, plan_memory
from abyssal.plan.resolve import resolve
from abyssal.plan.units import readable
from abyssal.quant.cache_rows import compressed_rows, index_rows, window_rows

GB = 10**9
TB = 10**12
TABLES = 196_613_849_600 + 6_144_182_800
ROUTED = 271_790_899_200 + 16_986_931_200
CHECKPOINT = 510_286_023_000
NOT_TEXT = 6_794_772_480 + 424_673_280 + 380_217_600 + 106_272_000 + 11_797_128 + 3_935_232 + 72_192 + 768 + 211_133_952
NOT_TEXT += 823_685_120 + 146_821_120 + 3 * 5120 * 2
REPLICATED = CHECKPOINT - NOT_TEXT - TABLES - ROUTED


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return released_config()


def plan_on(model: ModelConfig, machine: Machine, **settings: object) -> MemoryPlan:
    return plan_memory(model, EngineConfig(**settings), machine)  # type: ignore[arg-type]


def test_cache_sizes_of_the_released_model(released: ModelConfig) -> None:
    plan = plan_on(released, Machine(TB))
    assert plan.bytes_per_token_packed == 890
    assert plan.bytes_per_token == 2.5 * 4 * (512 + 128)
    partial = 3 * (2 + 6) * 2 * 512 * 4
    assert plan.slot_bytes_packed == 40 * (128 + 6) * 528 + partial
    assert plan.slot_bytes == 40 * (128 + 6) * 512 * 4 + partial


def test_declared_rows_are_as_long_as_packed_ones(released: ModelConfig) -> None:
    text = released.text
    spec = CacheSpec.of(text, Topology.of(text))
    assert spec.group("window_kv").packed_row_bytes == window_rows(text.head_dim).row_bytes
    assert spec.group("compressed_kv").packed_row_bytes == compressed_rows(text.head_dim).row_bytes
    assert spec.group("index_keys").packed_row_bytes == index_rows(text.index_head_dim).row_bytes


@pytest.mark.parametrize("num_devices", [4, 8, 16])
def test_weights_of_each_device(released: ModelConfig, num_devices: int) -> None:
    plan = plan_on(released, Machine(192 * GB, num_devices=num_devices))
    assert plan.held_as == "packed"
    assert plan.weight_bytes == pytest.approx(REPLICATED + (ROUTED + TABLES) / num_devices, abs=4)
    assert plan_on(released, Machine(192 * GB, num_devices=num_devices), engram="mmap").weight_bytes == pytest.approx(
        REPLICATED + ROUTED / num_devices, abs=4
    )


def test_decoded_weights_take_four_bytes_a_parameter(checkpoint_of: Callable[[str], Path]) -> None:
    model = ModelConfig.load(checkpoint_of("micro"))
    specs = expected_tensors(model)

    def size(name: str) -> int:
        return decoded_bytes(name, specs[name])

    assert size("layers.0.attn.wq_a.weight") == 64 * 256 * 4
    assert size("layers.0.attn.wq_a.scale") == 0
    assert size("layers.0.ffn.experts.0.w2.weight") == 256 * 128 * 4
    assert size("head.weight") == 405 * 256 * 4
    assert size("embed.weight") == 405 * 256 * 2
    assert size("layers.1.engram.embed.weight") == 630 * 32


@pytest.mark.parametrize(
    ("memory", "held_as", "engram"),
    [
        (4 * TB, "decoded", "memory"),
        (700 * GB, "packed", "memory"),
        (400 * GB, "packed", "mmap"),
        (16 * GB, "packed", "mmap"),
    ],
)
def test_fastest_choice_that_fits(released: ModelConfig, memory: int, held_as: str, engram: str) -> None:
    plan = plan_on(released, Machine(memory))
    assert (plan.held_as, plan.engram) == (held_as, engram)
    assert plan.shortfall <= 0
    assert plan.fixed_bytes + plan.pool_bytes <= memory * (1 - SPARE)
    everything = CHECKPOINT - NOT_TEXT
    if engram == "mmap":
        assert plan.mapped_bytes == pytest.approx(everything, rel=1e-4)


def test_sequences_that_fit_by_hand(released: ModelConfig) -> None:
    plan = plan_on(released, Machine(141 * GB, num_devices=8))
    left = int(141 * GB * 0.9) - (400 << 20) - plan.weight_bytes - plan.working_bytes
    assert plan.num_sequences(8192) == left // (plan.slot_bytes_packed + 8192 * 890)
    assert plan.num_sequences(8193) == left // (plan.slot_bytes_packed + (8192 + 128) * 890)


def test_explicit_settings_are_kept(released: ModelConfig) -> None:
    plan = plan_on(released, Machine(4 * TB), weights="packed", engram="mmap", cache_bytes=GB, max_num_seqs=3)
    assert (plan.held_as, plan.engram, plan.num_slots) == ("packed", "mmap", 3)
    assert plan.num_blocks == GB // (6400 * 128)
    assert plan_on(released, Machine(4 * TB), num_blocks=7).num_blocks == 7


def test_no_more_blocks_than_can_ever_be_used(checkpoint_of: Callable[[str], Path]) -> None:
    model = ModelConfig.load(checkpoint_of("micro"))
    assert plan_on(model, Machine(TB), max_num_seqs=2, max_model_len=300).num_blocks == 2 * 3


def test_resolve_leaves_no_auto_and_logs_decisions(
    checkpoint_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelConfig.load(checkpoint_of("micro"))
    with caplog.at_level(logging.INFO, logger="abyssal.plan.resolve"):
        config = resolve(model, EngineConfig(), Machine(8 * GB, num_processors=3))
    assert (config.weights, config.engram, config.num_threads) == ("decoded", "memory", 3)
    assert config.num_blocks is not None
    assert config.num_blocks >= 1
    assert "weights=decoded" in caplog.text
    assert resolve(model, replace(config, num_threads=1), Machine(8 * GB)) == replace(config, num_threads=1)


def test_refusal_names_the_numbers_and_the_ways_out(released: ModelConfig) -> None:
    with pytest.raises(CapacityExceeded) as caught:
        resolve(released, EngineConfig(weights="decoded", engram="memory"), Machine(64 * GB))
    text = str(caught.value)
    for part in ("2.41 TB", "57.6 GB", "are missing", "set weights to packed", "set engram to mmap"):
        assert part in text


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_blocks": 10**6}, CapacityExceeded, "1000000 cache blocks"),
        ({"cache_bytes": 1000}, CapacityExceeded, "one block of 128 tokens takes"),
        ({"num_blocks": 2, "max_model_len": 257}, CapacityExceeded, "the caches hold 256 tokens"),
        ({"max_model_len": 16385}, ConfigError, "the model ends at 16384 tokens"),
        ({"max_num_seqs": 10**6}, CapacityExceeded, "state of 1000000 sequences"),
    ],
)
def test_settings_that_cannot_fit(
    checkpoint_of: Callable[[str], Path], settings: dict[str, int], error: type[Exception], words: str
) -> None:
    model = ModelConfig.load(checkpoint_of("micro"))
    with pytest.raises(error, match=words):
        resolve(model, EngineConfig(**settings), Machine(8 * GB))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [(890, "890 B"), (999.6, "1 kB"), (19200, "19.2 kB"), (510_286_023_000, "510 GB"), (2.41e12, "2.41 TB")],
)
def test_readable(size: float, text: str) -> None:
    assert readable(size) == text
