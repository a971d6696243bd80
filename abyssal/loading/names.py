"""Every tensor of a checkpoint, from its configuration alone: names, shapes, dtypes, and what each is for.

Linear weights are [out, in]. The scale of `<name>.weight` is `<name>.scale` and follows it. The order is that of use in a
forward; random checkpoints are drawn in it. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..config.model import ModelConfig, TextConfig, VisionConfig
from ..config.topology import LayerPlan, Topology

DTYPE_BYTES = {
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "I32": 4,
    "I64": 8,
    "F64": 8,
    "BOOL": 1,
}
"""Bytes of an element, by the name that safetensors gives its dtype."""

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

GROUP = 32
"""Elements that share a scale."""

Part = Literal["text", "draft", "vision"]

NARROW = ("BF16", "F32")
"""Norms, gates and Engram's norm weights may be stored in either; released in the first."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One expected tensor.

    Attributes:
        dtypes: accepted dtypes, the released one first.
        kind: what it is for, one word per row of a table of sizes.
        part: "text", "draft" or "vision".
    """

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str
    part: Part = "text"

    @property
    def num_bytes(self) -> int:
        """Bytes in the released dtype."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtypes[0]]


Named = Iterator[tuple[str, TensorSpec]]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint with this configuration, by name."""
    text = config.text
    specs = dict(_globals(text))
    for plan in Topology.of(text).layers:
        specs.update(_layer(text, plan))
    for stage in range(text.num_nextn_predict_layers):
        specs.update(_draft_stage(text, stage))
    if config.vision.num_hidden_layers:
        specs.update(_vision(config.vision, text.hidden_size))
    return specs


def bytes_by_kind(specs: dict[str, TensorSpec]) -> dict[str, int]:
    """Sizes in the released dtypes, in the order in which kinds appear."""
    totals: dict[str, int] = {}
    for spec in specs.values():
        totals[spec.kind] = totals.get(spec.kind, 0) + spec.num_bytes
    return totals


def _fp8(name: str, rows: int, columns: int, kind: str, part: Part) -> Named:
    yield f"{name}.weight", TensorSpec(("F8_E4M3",), (rows, columns), kind, part)
    yield f"{name}.scale", TensorSpec(("F8_E8M0",), (rows // GROUP, columns // GROUP), kind, part)


def _fp4(name: str, rows: int, columns: int, kind: str, part: Part) -> Named:
    yield f"{name}.weight", TensorSpec(("I8",), (rows, columns // 2), kind, part)
    scale_kind = f"{kind.removesuffix('s')}_scales"
    yield f"{name}.scale", TensorSpec(("F8_E8M0",), (rows, columns // GROUP), scale_kind, part)


def _globals(text: TextConfig) -> Named:
    for name in ("embed", "head"):
        yield f"{name}.weight", TensorSpec(("BF16",), (text.vocab_size, text.hidden_size), "embeddings")
    yield "norm.weight", TensorSpec(NARROW, (text.hidden_size,), "embeddings")


def _layer(text: TextConfig, plan: LayerPlan) -> Named:
    prefix = f"layers.{plan.layer_id}"
    yield from _mixing(text, prefix, "text")
    yield from _attention(text, f"{prefix}.attn", "text")
    yield from _selection(text, plan, f"{prefix}.attn")
    yield from _experts(text, f"{prefix}.ffn", text.n_routed_experts, "text")
    if plan.engram_index is not None:
        yield from _engram(text, f"{prefix}.engram", text.engram_num_embeddings[plan.engram_index])


def _selection(text: TextConfig, plan: LayerPlan, attn: str) -> Named:
    """What source layers have beside plain attention."""
    if plan.owns_compressed:
        yield from _compressor(text, attn, gated=plan.ratio > 1)
    if plan.selects:
        out = text.index_n_heads * text.index_head_dim
        yield from _fp8(f"{attn}.indexer.wq_b", out, text.q_lora_rank, "indexer", "text")
        shape = (text.index_n_heads, text.hidden_size)
        yield f"{attn}.indexer.weights_proj.weight", TensorSpec(("BF16",), shape, "indexer")


def _mark(part: Part) -> str:
    """Prefix of kinds: draft stages are counted apart."""
    return "" if part == "text" else "draft_"


def _mixing(text: TextConfig, prefix: str, part: Part) -> Named:
    """Norms and hyper-connections of a layer or a draft stage."""
    hidden, streams = text.hidden_size, text.hc_mult
    mixes = (2 + streams) * streams
    for site in ("attn", "ffn"):
        yield f"{prefix}.{site}_norm.weight", TensorSpec(NARROW, (hidden,), f"{_mark(part)}norms", part)
    for site in ("attn", "ffn"):
        for name, shape in (("fn", (mixes, streams * hidden)), ("base", (mixes,)), ("scale", (3,))):
            yield f"{prefix}.hc_{site}_{name}", TensorSpec(("F32",), shape, f"{_mark(part)}hyper_connections", part)


def _attention(text: TextConfig, attn: str, part: Part) -> Named:
    hidden, heads_width = text.hidden_size, text.num_attention_heads * text.head_dim
    low_rank_out = text.o_groups * text.o_lora_rank
    kind, norms = f"{_mark(part)}attention", f"{_mark(part)}norms"
    yield f"{attn}.attn_sink", TensorSpec(("F32",), (text.num_attention_heads,), f"{_mark(part)}sinks", part)
    yield from _fp8(f"{attn}.wq_a", text.q_lora_rank, hidden, kind, part)
    yield f"{attn}.q_norm.weight", TensorSpec(NARROW, (text.q_lora_rank,), norms, part)
    yield from _fp8(f"{attn}.wq_b", heads_width, text.q_lora_rank, kind, part)
    yield from _fp8(f"{attn}.wkv", text.head_dim, hidden, kind, part)
    yield f"{attn}.kv_norm.weight", TensorSpec(NARROW, (text.head_dim,), norms, part)
    yield from _fp8(f"{attn}.wo_a", low_rank_out, heads_width // text.o_groups, kind, part)
    yield from _fp8(f"{attn}.wo_b", hidden, low_rank_out, kind, part)


def _experts(text: TextConfig, ffn: str, num_experts: int, part: Part) -> Named:
    hidden, inner, mark = text.hidden_size, text.moe_intermediate_size, _mark(part)
    yield f"{ffn}.gate.weight", TensorSpec(NARROW, (num_experts, hidden), f"{mark}gates", part)
    for name in ("bias", "bias_vl"):
        yield f"{ffn}.gate.{name}", TensorSpec(("F32",), (num_experts,), f"{mark}gates", part)
    matrices = (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner))
    for expert in range(num_experts):
        for name, rows, columns in matrices:
            yield from _fp4(f"{ffn}.experts.{expert}.{name}", rows, columns, f"{mark}experts", part)
    for name, rows, columns in matrices:
        yield from _fp8(f"{ffn}.shared_experts.{name}", rows, columns, f"{mark}shared_experts", part)


def _compressor(text: TextConfig, attn: str, *, gated: bool) -> Named:
    projection = TensorSpec(("BF16",), (text.head_dim, text.hidden_size), "compressors")
    yield f"{attn}.compressor.wkv.weight", projection
    yield f"{attn}.compressor.norm.weight", TensorSpec(NARROW, (text.head_dim,), "compressors")
    if gated:
        yield f"{attn}.compressor.wgate.weight", projection
    yield f"{attn}.indexer.wk.weight", TensorSpec(("BF16",), (text.index_head_dim, text.head_dim), "indexer")
    yield f"{attn}.indexer.k_norm.weight", TensorSpec(NARROW, (text.index_head_dim,), "indexer")


def _engram(text: TextConfig, engram: str, rows: int) -> Named:
    width = text.engram_head_dim
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads * width
    yield f"{engram}.embed.weight", TensorSpec(("F8_E4M3",), (rows, width), "engram_tables")
    yield f"{engram}.embed.scale", TensorSpec(("F8_E8M0",), (rows, width // GROUP), "engram_table_scales")
    yield from _fp8(f"{engram}.wkv", text.hidden_size * (text.hc_mult + 1), columns, "engram_projections", "text")
    for name in ("q_weight", "k_weight"):
        yield f"{engram}.{name}", TensorSpec(NARROW, (text.hc_mult, text.hidden_size), "engram_norms")


def _draft_stage(text: TextConfig, stage: int) -> Named:
    prefix, kind, hidden = f"mtp.{stage}", "draft_extras", text.hidden_size
    yield from _mixing(text, prefix, "draft")
    yield from _attention(text, f"{prefix}.attn", "draft")
    yield from _experts(text, f"{prefix}.ffn", text.dspark_n_routed_experts, "draft")
    if stage == 0:
        yield from _fp8(f"{prefix}.main_proj", hidden, hidden * len(text.dspark_target_layer_ids), kind, "draft")
        yield f"{prefix}.main_norm.weight", TensorSpec(NARROW, (hidden,), kind, "draft")
    if stage == text.num_nextn_predict_layers - 1:
        yield f"{prefix}.norm.weight", TensorSpec(NARROW, (hidden,), kind, "draft")
        for name in ("embed", "head"):
            shape = (text.vocab_size, text.dspark_markov_rank)
            yield f"{prefix}.markov_head.{name}.weight", TensorSpec(("BF16",), shape, kind, "draft")
        shape = (1, hidden + text.dspark_markov_rank)
        yield f"{prefix}.confidence_head.proj.weight", TensorSpec(NARROW, shape, kind, "draft")


def _vision(vision: VisionConfig, text_hidden: int) -> Named:
    hidden, inner = vision.hidden_size, vision.intermediate_size

    def affine(name: str, rows: int, columns: int, kind: str = "vision") -> Named:
        yield f"{name}.weight", TensorSpec(("BF16",), (rows, columns), kind, "vision")
        yield f"{name}.bias", TensorSpec(("BF16",), (rows,), kind, "vision")

    yield from affine("vision.patch_embed.proj", hidden, 3 * vision.patch_size**2)
    for index in range(vision.num_hidden_layers):
        block = f"vision.blocks.{index}"
        for name in ("norm1", "norm2"):
            yield f"{block}.{name}.weight", TensorSpec(NARROW, (hidden,), "vision", "vision")
        yield from affine(f"{block}.attn.wqkv", 3 * hidden, hidden)
        yield from affine(f"{block}.attn.wo", hidden, hidden)
        yield f"{block}.mlp.w1.weight", TensorSpec(("BF16",), (2 * inner, hidden), "vision", "vision")
        yield f"{block}.mlp.w2.weight", TensorSpec(("BF16",), (hidden, inner), "vision", "vision")
    yield "vision.norm.weight", TensorSpec(NARROW, (hidden,), "vision", "vision")
    yield from affine("aligner.w1", text_hidden, hidden * vision.downsample_ratio**2, "aligner")
    yield from affine("aligner.w2", text_hidden, text_hidden, "aligner")
    for name in ("image_start", "image_end", "image_newline"):
        yield name, TensorSpec(NARROW, (text_hidden,), "embeddings", "vision")
