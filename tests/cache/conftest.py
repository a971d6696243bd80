"""Model shapes for the cache tests: the released model's, and a small one."""

import dataclasses

import pytest

from abyssal.config.model import RopeScaling, TextConfig

RELEASED = TextConfig(
    vocab_size=129280,
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1280,
    o_lora_rank=1024,
    o_groups=8,
    swiglu_limit=10.0,
    rms_norm_eps=1e-20,
    max_position_embeddings=1048576,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=RopeScaling(16.0, 32.0, 1.0, 65536),
    sliding_window=128,
    compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
    kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    n_routed_experts=384,
    n_shared_experts=1,
    num_experts_per_tok=6,
    moe_intermediate_size=2304,
    routed_scaling_factor=1.5,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    engram_layer_ids=(1, 14),
    engram_num_embeddings=(384006168, 384016682),
    engram_max_ngram_size=4,
    engram_n_heads=8,
    engram_head_dim=256,
    engram_vocab_size=16000000,
    engram_pad_token_id=2,
    engram_compressed_vocab_size=99092,
    num_nextn_predict_layers=3,
    dspark_block_size=5,
    dspark_noise_token_id=128799,
    dspark_target_layer_ids=(37, 38, 39),
    dspark_markov_rank=256,
    dspark_n_routed_experts=128,
    dspark_num_experts_per_tok=3,
)

SMALL = dataclasses.replace(
    RELEASED,
    num_hidden_layers=8,
    head_dim=64,
    sliding_window=16,
    compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 0, 0),
    kv_source_layer_ids=(2, 5),
    index_source_layer_ids=(2, 5, 7),
    index_head_dim=32,
    candidate_source_layer_id=5,
    engram_layer_ids=(1, 4),
    num_nextn_predict_layers=2,
    dspark_block_size=3,
    dspark_target_layer_ids=(5, 6, 7),
)


@pytest.fixture(scope="session")
def released_config():
    return RELEASED


@pytest.fixture(scope="session")
def small_config():
    return SMALL
