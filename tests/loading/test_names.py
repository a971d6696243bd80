"""The expected tensors against the released model's published totals, and against files written by the generator."""

from __future__ import annotations

import pytest

from abyssal.config.released import released_config
from abyssal.loading.names import TensorSpec, bytes_by_kind, expected_tensors


@pytest.fixture(scope="module")
def released() -> dict[str, TensorSpec]:
    return expected_tensors(released_config())


def test_audit_of_the_released_model(released: dict[str, TensorSpec]) -> None:
    assert len(released) == 96_085
    assert sum(spec.num_bytes for spec in released.values()) == 510_286_023_000


def test_byte_classes(released: dict[str, TensorSpec]) -> None:
    assert bytes_by_kind(released) == {
        "embeddings": 2_647_695_360,
        "attention": 5_069_568_000,
        "shared_experts": 1_416_960_000,
        "experts": 271_790_899_200,
        "expert_scales": 16_986_931_200,
        "norms": 962_560,
        "sinks": 10_240,
        "hyper_connections": 157_295_040,
        "gates": 157_409_280,
        "engram_tables": 196_613_849_600,
        "engram_table_scales": 6_144_182_800,
        "engram_projections": 314_880_000,
        "engram_norms": 163_840,
        "compressors": 36_704_256,
        "indexer": 45_130_752,
        "draft_attention": 380_217_600,
        "draft_experts": 6_794_772_480,
        "draft_expert_scales": 424_673_280,
        "draft_shared_experts": 106_272_000,
        "draft_hyper_connections": 11_797_128,
        "draft_gates": 3_935_232,
        "draft_norms": 72_192,
        "draft_sinks": 768,
        "draft_extras": 211_133_952,
        "vision": 823_685_120,
        "aligner": 146_821_120,
    }


def test_counts_by_part(released: dict[str, TensorSpec]) -> None:
    parts = [spec.part for spec in released.values()]
    assert parts.count("draft") == 2401
    assert parts.count("vision") == 263 + 3
    assert sum(spec.dtypes == ("F8_E4M3",) and spec.kind != "engram_tables" for spec in released.values()) == 355
    assert sum(spec.dtypes == ("I8",) for spec in released.values()) == 47_232


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.39.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.39.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.0.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.0.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.20.attn.compressor.wkv.weight", "BF16", (512, 5120)),
        ("layers.36.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280)),
        ("layers.7.hc_ffn_fn", "F32", (24, 20480)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.1.ffn.gate.bias_vl", "F32", (128,)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
    ],
)
def test_single_entries(released: dict[str, TensorSpec], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert (released[name].dtypes[0], released[name].shape) == (dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 pools nothing
        "layers.24.attn.indexer.wk.weight",  # reads layer 20's keys
        "layers.3.attn.indexer.wq_b.weight",
        "layers.0.engram.wkv.weight",
        "mtp.1.main_norm.weight",
        "mtp.0.attn.compressor.wkv.weight",
    ],
)
def test_layers_without_a_role_have_no_tensors_for_it(released: dict[str, TensorSpec], name: str) -> None:
    assert name not in released
