"""config.json to `ModelConfig`: every key is checked against what this code supports."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from .engram_hash import engram_primes
from .model import ModelConfig, RopeScaling, TextConfig, VisionConfig
from .section import PLACEHOLDER, Section
from .topology import Topology

logger = logging.getLogger(__name__)

MODEL_TYPE = "deepseek_v41"
BLOCK = 32
"""Channels of one scale in the block formats; widths that they touch are multiples of it."""

MAX_RATIO = 2
MAX_TABLE_PRIME = 2**31


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: if the file is missing or holds anything else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist, so {path.parent} is no model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__} where a JSON object is expected")
    return values


def read_model_config(values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Check and convert the content of a config.json.

    Raises:
        ConfigError: listing every key that is missing or holds what this code does not support.
    """
    if values.get("model_type") != MODEL_TYPE:
        raise ConfigError(
            f"{source}: model_type={values.get('model_type')!r} is another model. Only {MODEL_TYPE!r} "
            "(DeepSeek-V4.1-Flash) is supported"
        )
    root = Section(values)
    root.fixed("architectures", ["DeepseekV41ForCausalLM"])
    root.fixed("tie_word_embeddings", False)
    root.ignore("model_type", "dtype", "torch_dtype", "transformers_version", "tokenizer_compatibility")
    text_section, vision_section = root.section("text_config"), root.section("vision_config", optional=True)
    sections = [root, text_section, vision_section]
    text = _read_text(text_section) if "text_config" in root else None
    vision = _read_vision(vision_section)
    expert_dtype = _read_quantization(root, sections)
    vocab_size = text.vocab_size if text is not None else PLACEHOLDER
    config_ids = {name: root.integer(name, least=0, most=vocab_size - 1) for name in ("bos_token_id", "eos_token_id")}
    pad = root.integer("pad_token_id", least=0, most=vocab_size - 1, default=config_ids["eos_token_id"])
    image = root.integer("image_token_id", least=0, most=vocab_size - 1, default=None if vision.num_hidden_layers else -1)
    if text is not None and not root.problems:
        _check_structure(text, root.problems)
    if root.problems:
        count = len(root.problems)
        lines = "".join(f"\n  - {problem}" for problem in root.problems)
        raise ConfigError(f"{source} is not supported: {count} problem{'s' if count > 1 else ''}{lines}")
    assert text is not None, "a missing text_config is a problem"
    unread = [key for section in sections for key in section.unread()]
    if unread:
        logger.info("%s: ignored keys that this version does not know: %s", source, ", ".join(unread))
    return ModelConfig(
        text=text, vision=vision, pad_token_id=pad, image_token_id=image, expert_dtype=expert_dtype, **config_ids
    )


def _read_quantization(root: Section, sections: list[Section]) -> str:
    quantization = root.section("quantization_config")
    sections.append(quantization)
    if "quantization_config" in root:
        quantization.fixed("quant_method", "fp8", required=True)
        quantization.fixed("weight_block_size", [BLOCK, BLOCK], required=True)
        quantization.fixed("scale_fmt", "ue8m0", required=True)
        quantization.fixed("activation_scheme", "dynamic")
        quantization.fixed("expert_dtype", "fp4")
        quantization.fixed("fmt", "e4m3")
    return "fp4"


def _read_text(s: Section) -> TextConfig:
    _check_fixed(s)
    layers = s.integer("num_hidden_layers")
    vocab_size = s.integer("vocab_size")
    nextn = s.integer("num_nextn_predict_layers", least=0, default=0)
    last = layers - 1
    return TextConfig(
        vocab_size=vocab_size,
        hidden_size=s.integer("hidden_size", multiple_of=BLOCK),
        num_hidden_layers=layers,
        rope_scaling=_read_rope_scaling(s.section("rope_scaling")),
        max_position_embeddings=s.integer("max_position_embeddings"),
        sliding_window=s.integer("sliding_window"),
        compress_ratios=s.integers("compress_ratios", most=MAX_RATIO),
        kv_source_layer_ids=s.integers("kv_source_layer_ids", most=last, ascending=True),
        index_source_layer_ids=s.integers("index_source_layer_ids", most=last, ascending=True),
        candidate_source_layer_id=s.integer("candidate_source_layer_id", least=0, most=last),
        n_routed_experts=s.integer("n_routed_experts"),
        n_shared_experts=s.integer("n_shared_experts", most=1),
        num_experts_per_tok=s.integer("num_experts_per_tok"),
        moe_intermediate_size=s.integer("moe_intermediate_size", multiple_of=BLOCK),
        num_nextn_predict_layers=nextn,
        **_read_attention(s),
        **_read_real(s),
        **_read_engram(s, last, vocab_size),
        **_read_drafts(s, nextn, last, vocab_size),
    )


def _check_fixed(s: Section) -> None:
    """Keys with one supported value, and keys that change nothing."""
    s.fixed("model_type", "deepseek_v41_text")
    s.fixed("num_key_value_heads", 1)
    s.fixed("hidden_act", "silu")
    s.fixed("attention_bias", False)
    s.fixed("tie_word_embeddings", False)
    s.fixed("scoring_func", "sqrtsoftplus")
    s.fixed("topk_method", "noaux_tc")
    s.fixed("norm_topk_prob", True)
    s.fixed("hc_shifted", True)
    s.fixed("use_fp4_sparse_kv", True)
    s.fixed("dspark_target_attn_input", True)
    s.fixed("gate_temp", 1.0)
    if "index_k_source_layer_ids" in s and "kv_source_layer_ids" in s:
        s.fixed("index_k_source_layer_ids", list(s.integers("kv_source_layer_ids")))
    s.ignore("attention_dropout", "initializer_range", "use_cache", "router_aux_loss_coef", "dtype", "torch_dtype")
    s.ignore("bos_token_id", "eos_token_id", "pad_token_id")


def _read_rope_scaling(s: Section) -> RopeScaling:
    s.fixed("rope_type" if "rope_type" in s else "type", "yarn", required=True)
    return RopeScaling(
        factor=s.number("factor", at_least=1.0),
        beta_fast=s.number("beta_fast"),
        beta_slow=s.number("beta_slow"),
        original_max_position_embeddings=s.integer("original_max_position_embeddings"),
    )


def _read_attention(s: Section) -> dict[str, Any]:
    multiples = {"head_dim": BLOCK, "q_lora_rank": BLOCK, "index_head_dim": BLOCK, "qk_rope_head_dim": 2}
    plain = (
        "num_attention_heads",
        "o_lora_rank",
        "o_groups",
        "index_n_heads",
        "index_topk",
        "candidate_topk_blocks",
        "candidate_block_size",
        "hc_mult",
        "hc_sinkhorn_iters",
    )
    return {key: s.integer(key, multiple_of=multiples.get(key, 1)) for key in (*multiples, *plain)}


def _read_real(s: Section) -> dict[str, Any]:
    keys = ("swiglu_limit", "rms_norm_eps", "rope_theta", "compress_rope_theta", "routed_scaling_factor", "hc_eps")
    return {key: s.number(key) for key in keys}


def _read_engram(s: Section, last: int, vocab_size: int) -> dict[str, Any]:
    pad_key = "engram_pad_id" if "engram_pad_id" in s and "engram_pad_token_id" not in s else "engram_pad_token_id"
    return {
        "engram_layer_ids": s.integers("engram_layer_ids", most=last, ascending=True),
        "engram_num_embeddings": s.integers("engram_num_embeddings", least=1),
        "engram_max_ngram_size": s.integer("engram_max_ngram_size", least=2),
        "engram_n_heads": s.integer("engram_n_heads"),
        "engram_head_dim": s.integer("engram_head_dim", multiple_of=BLOCK),
        "engram_vocab_size": s.integer("engram_vocab_size", least=2, most=MAX_TABLE_PRIME),
        "engram_compressed_vocab_size": s.integer("engram_compressed_vocab_size", most=vocab_size),
        "engram_pad_token_id": s.integer(pad_key, least=0, most=vocab_size - 1),
    }


def _read_drafts(s: Section, nextn: int, last: int, vocab_size: int) -> dict[str, Any]:
    if nextn == 0:
        sizes = ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok")
        s.ignore(*sizes, "dspark_noise_token_id", "dspark_target_layer_ids")
        return dict.fromkeys(sizes, 0) | {"dspark_noise_token_id": 0, "dspark_target_layer_ids": ()}
    return {
        "dspark_block_size": s.integer("dspark_block_size"),
        "dspark_noise_token_id": s.integer("dspark_noise_token_id", least=0, most=vocab_size - 1),
        "dspark_target_layer_ids": s.integers("dspark_target_layer_ids", most=last, ascending=True),
        "dspark_markov_rank": s.integer("dspark_markov_rank"),
        "dspark_n_routed_experts": s.integer("dspark_n_routed_experts"),
        "dspark_num_experts_per_tok": s.integer("dspark_num_experts_per_tok"),
    }


def _read_vision(s: Section) -> VisionConfig:
    s.fixed("model_type", "deepseek_v41_vision")
    if s.integer("num_hidden_layers", least=0, default=0) == 0:
        return VisionConfig(0, 0, 0, 0, 0, 0.0, 0, 0, 0, None)
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    limits = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels")
    return VisionConfig(
        **{key: s.integer(key) for key in (*sizes, *limits)},
        rope_theta=s.number("rope_theta"),
        max_wh_ratio=s.number("max_wh_ratio") if s.get("max_wh_ratio") is not None else None,
    )


def _check_structure(t: TextConfig, problems: list[str]) -> None:
    """Relations between keys, once each key is sound by itself."""

    def need(holds: bool, key: str, supported: str) -> None:
        if not holds:
            problems.append(f"text_config.{key}={getattr(t, key)!r}: {supported}")

    layers, nextn = t.num_hidden_layers, t.num_nextn_predict_layers
    lengths = {layers, layers + nextn}
    need(len(t.compress_ratios) in lengths, "compress_ratios", f"must have {' or '.join(map(str, sorted(lengths)))} entries")
    need(not any(t.compress_ratios[layers:]), "compress_ratios", "draft stages (the last entries) must have ratio 0")
    need(t.num_attention_heads % t.o_groups == 0, "o_groups", f"must divide num_attention_heads={t.num_attention_heads}")
    need(t.o_groups * t.o_lora_rank % BLOCK == 0, "o_lora_rank", f"times o_groups must be a multiple of {BLOCK}")
    rope_limit = min(t.head_dim, t.index_head_dim)
    need(t.qk_rope_head_dim <= rope_limit, "qk_rope_head_dim", f"must be at most {rope_limit}, the smallest head")
    need(
        t.num_experts_per_tok <= t.n_routed_experts, "num_experts_per_tok", f"exceeds n_routed_experts={t.n_routed_experts}"
    )
    need(
        t.dspark_num_experts_per_tok <= t.dspark_n_routed_experts,
        "dspark_num_experts_per_tok",
        f"exceeds dspark_n_routed_experts={t.dspark_n_routed_experts}",
    )
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        ratios = dict(enumerate(t.compress_ratios))
        need(all(ratios.get(layer) for layer in getattr(t, key)), key, "must list layers with a compress ratio above 0")
    rows = [sum(primes) for primes in engram_primes(t)]
    need(list(t.engram_num_embeddings) == rows, "engram_num_embeddings", f"the hash needs tables of {rows} rows")
    if not problems:
        try:
            Topology.of(t)
        except ConfigError as error:
            problems.append(f"text_config: {error}")
