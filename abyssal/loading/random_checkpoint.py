"""Write a random checkpoint in the released layout, so that whatever loads it loads the real model.

Same tensor names, dtypes and block formats as the released checkpoint, at the dimensions of a preset, with a tokenizer that
has merges, pairs of case and the model's special tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from ..config.engram_hash import hash_primes
from ..config.model import ModelConfig
from ..core.errors import ConfigError
from ..text.vocabulary import compressed_token_map
from .names import INDEX_FILE, expected_tensors
from .random_values import draw_stored

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<think>",
    "</think>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "｜DSML｜",
    "<｜deepseek_image｜>",
    "<｜noise｜>",
)

_VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "patch_size": 14,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 7056,
}

PRESETS: dict[str, dict[str, Any]] = {
    # every mechanism on, small enough for a unit test
    "micro": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [2, 5],
        "index_source_layer_ids": [2, 5, 7],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "engram_layer_ids": [1, 4],
        "engram_vocab_size": 97,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 3,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 16384,
        "vision": _VISION,
    },
    # the released schedule of 40 layers at toy width: mistakes in layer indices show here
    "deep": {
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 40,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "sliding_window": 32,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 16,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 6,
        "candidate_block_size": 8,
        "engram_layer_ids": [1, 14],
        "engram_vocab_size": 197,
        "engram_n_heads": 4,
        "engram_head_dim": 32,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 3,
        "original_max_position_embeddings": 128,
        "max_position_embeddings": 131072,
        "vision": _VISION | {"num_hidden_layers": 1},
    },
}
"""Dimensions by name. Those that the block formats touch are multiples of 32, as in the released model."""

_FREE_KEYS = ("engram_max_ngram_size", "hc_mult", "swiglu_limit", "routed_scaling_factor", "hc_sinkhorn_iters")

_WORDS = (
    "the The THE token Token model Model cache Cache expert Expert draft verify window layer Layer "
    'attention compress index café naïve 模型 专家 注意力 {"name": 1} return self def class import'
)


def write_random_checkpoint(
    out: str | Path,
    preset: str,
    seed: int,
    vocab_size: int = 512,
    padded_vocab_size: int | None = None,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint; the same arguments give the same bytes.

    Args:
        out: folder, made if it does not exist.
        preset: a key of `PRESETS`.
        vocab_size: ids that the tokenizer has at most.
        padded_vocab_size: rows of the embedding, if more than the tokenizer has ids.
        overrides: replace dimensions of the preset (keys of `text_config`; `vision` is a dict, or None for no tower).

    Returns:
        `out`.

    Raises:
        ConfigError: for an unknown preset or dimension, or dimensions that do not go together.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset={preset!r}: must be one of {', '.join(sorted(PRESETS))}")
    unknown = sorted(overrides.keys() - PRESETS[preset].keys() - set(_FREE_KEYS))
    if unknown:
        raise ConfigError(f"{unknown[0]}={overrides[unknown[0]]!r}: no dimension of a preset")
    out = Path(out)
    tokenizer = build_tokenizer(vocab_size)
    rows = max(tokenizer.get_vocab_size(), padded_vocab_size or 0)
    values = _config_json(PRESETS[preset] | overrides, tokenizer, rows)
    tensors = _draw_tensors(ModelConfig.from_json(values), seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(out / "config.json", values, indent=2)
    _write_json(out / "tokenizer_config.json", _tokenizer_config(values), indent=2)
    _write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "temperature": 1.0, "top_p": 1.0})
    _write_shards(out, tensors)
    return out


def build_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE trained on a few words, special tokens first."""
    rng = np.random.default_rng(0)
    words = _WORDS.split(" ")
    corpus = [" ".join(rng.choice(words, 12)) for _ in range(400)]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[tokenizers.AddedToken(token, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _config_json(dimensions: dict[str, Any], tokenizer: tokenizers.Tokenizer, rows: int) -> dict[str, Any]:
    dimensions = {"engram_max_ngram_size": 4, "hc_mult": 4} | dimensions
    vision = dimensions.pop("vision") or {"num_hidden_layers": 0}
    original_length = dimensions.pop("original_max_position_embeddings")
    primes = hash_primes(
        len(dimensions["engram_layer_ids"]),
        dimensions["engram_max_ngram_size"],
        dimensions["engram_n_heads"],
        dimensions["engram_vocab_size"],
    )
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": rows,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": original_length,
        },
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_num_embeddings": [sum(layer) for layer in primes],
        "engram_pad_token_id": ids["<｜▁pad▁｜>"],
        "engram_compressed_vocab_size": int(compressed_token_map(tokenizer, rows).max()) + 1,
        "dspark_noise_token_id": ids["<｜noise｜>"],
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **special,
        "image_token_id": ids["<｜deepseek_image｜>"],
        "tie_word_embeddings": False,
        "text_config": text | special | dimensions,
        "vision_config": {"model_type": "deepseek_v41_vision", "rope_theta": 10000.0, "max_wh_ratio": None} | vision,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }


def _tokenizer_config(values: dict[str, Any]) -> dict[str, Any]:
    bos, eos, pad = SPECIAL_TOKENS[:3]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": values["text_config"]["max_position_embeddings"],
    }


def _draw_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    stored_as = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in expected_tensors(config).items():
        if name in tensors:
            continue  # a scale, drawn with its weight
        # Engram's norm weights in the wider of the accepted dtypes, so that both are met
        dtype = spec.dtypes[-1 if spec.kind == "engram_norms" else 0]
        data, scale = draw_stored(name, dtype, spec.shape, generator)
        tensors[name] = data.view(stored_as[dtype]) if dtype in stored_as else data
        if scale is not None:
            tensors[name.removesuffix(".weight") + ".scale"] = scale.view(stored_as["F8_E8M0"])
    return tensors


def _write_shards(out: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Two shards and an index, as a released checkpoint has many."""
    names = sorted(tensors)
    half = len(names) // 2
    shards = {f"model-{i + 1:05d}-of-00002.safetensors": part for i, part in enumerate((names[:half], names[half:]))}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, str(out / shard), metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: shard for shard, part in shards.items() for name in part},
    }
    _write_json(out / INDEX_FILE, index, indent=1)


def _write_json(path: Path, values: dict[str, Any], indent: int | None = None) -> None:
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=path.name != "tokenizer_config.json") + "\n")
