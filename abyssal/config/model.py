"""The model's configuration as frozen dataclasses, read from a `deepseek_v41` config.json and checked field by field.

Attribute names are the checkpoint's key names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the compressed layers' rotary table."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class TextConfig:
    """`text_config`: the language model, its Engram tables and its draft stages."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int


@dataclass(frozen=True)
class VisionConfig:
    """`vision_config`: the image tower. `num_hidden_layers` 0 means none."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True)
class ModelConfig:
    """A whole config.json."""

    text: TextConfig
    vision: VisionConfig
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    expert_dtype: str

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Read and check a config.json, given as a file or as its content.

        Raises:
            ConfigError: listing every key that is missing or holds what this code does not support.
        """
        from .reader import read_json, read_model_config  # the reader builds this class

        if isinstance(source, Mapping):
            return read_model_config(source)
        return read_model_config(read_json(Path(source)), str(source))

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Read and check the config.json of a model folder; errors as for `from_json`."""
        return cls.from_json(Path(folder) / "config.json")
