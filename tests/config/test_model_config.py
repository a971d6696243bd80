"""config.json: what is read, and what is refused with which words."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from abyssal.config.model import ModelConfig
from abyssal.config.released import RELEASED_CONFIG, released_config
from abyssal.config.topology import Topology
from abyssal.core.errors import ConfigError


def changed(**text: Any) -> dict[str, Any]:
    """The released config.json with keys of `text_config` replaced, or left out where the value is `...`."""
    values = copy.deepcopy(RELEASED_CONFIG)
    for key, value in text.items():
        if value is ...:
            values["text_config"].pop(key, None)
        else:
            values["text_config"][key] = value
    return values


def problem_with(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(values)
    return str(caught.value)


def test_released_values() -> None:
    config = released_config()
    assert (config.text.hidden_size, config.text.num_hidden_layers, config.text.rms_norm_eps) == (5120, 40, 1e-20)
    assert config.text.rope_scaling.factor == 16.0
    assert config.text.compress_ratios == (0, 0) + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert config.vision.num_hidden_layers == 32
    assert config.vision.max_wh_ratio is None
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id) == (0, 1, 2, 129264)
    assert config.expert_dtype == "fp4"


def test_released_roles() -> None:
    plans = Topology.of(released_config().text).layers
    assert [p.layer_id for p in plans if p.owns_compressed] == [2, 8, 14, 20]
    assert [p.layer_id for p in plans if p.selects] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [p.layer_id for p in plans if p.owns_partial_group] == [2, 8, 14]
    assert [p.layer_id for p in plans if p.uses_candidates] == [24, 28, 32, 36]
    assert [(p.kv_source, p.index_source) for p in (plans[1], plans[13], plans[19], plans[39])] == [
        (None, None),
        (8, 8),
        (14, 14),
        (20, 36),
    ]


def test_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED_CONFIG))
    assert ModelConfig.load(tmp_path) == ModelConfig.from_json(tmp_path / "config.json") == released_config()


def test_missing_and_malformed_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="a list where a JSON object"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "llama", None])
def test_another_models_config_is_one_clear_error(model_type: str | None) -> None:
    text = problem_with({"model_type": model_type, "hidden_size": 4096})
    assert repr(model_type) in text
    assert "deepseek_v41" in text
    assert "\n" not in text


def test_all_problems_at_once_with_key_value_and_limit() -> None:
    values = changed(hidden_size=5100, scoring_func="softmax", num_attention_heads=True, q_lora_rank=..., rope_theta=-1)
    values["quantization_config"]["weight_block_size"] = [128, 128]
    text = problem_with(values)
    assert "6 problems" in text
    for line in (
        "text_config.hidden_size=5100: must be a multiple of 32",
        "text_config.scoring_func='softmax': only 'sqrtsoftplus' is supported",
        "text_config.num_attention_heads=True: must be a whole number",
        "text_config.q_lora_rank=<missing>: must be a whole number",
        "text_config.rope_theta=-1: must be a number above 0",
        "quantization_config.weight_block_size=[128, 128]: only [32, 32] is supported",
    ):
        assert f"- {line}" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("num_key_value_heads", 8),
        ("norm_topk_prob", False),
        ("norm_topk_prob", 1),
        ("hc_shifted", False),
        ("use_fp4_sparse_kv", False),
        ("index_k_source_layer_ids", [2, 8]),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("compress_ratios", [0] * 39),
        ("compress_ratios", [0, 0] + [4] * 38),
        ("compress_ratios", [0, 0] + [2] * 18 + [1] * 21 + [0] * 2),
        ("kv_source_layer_ids", [0, 2, 8, 14, 20]),
        ("kv_source_layer_ids", [8, 2, 14, 20]),
        ("kv_source_layer_ids", [3, 8, 14, 20]),
        ("kv_source_layer_ids", [2, 8, 14, 20, 40]),
        ("index_source_layer_ids", [2, 8, 14, 20, 40]),
        ("candidate_source_layer_id", 21),
        ("num_experts_per_tok", 385),
        ("n_shared_experts", 2),
        ("o_groups", 7),
        ("qk_rope_head_dim", 256),
        ("engram_num_embeddings", [384006168, 384016681]),
        ("engram_compressed_vocab_size", 129281),
        ("engram_pad_token_id", 129280),
        ("moe_intermediate_size", 0),
        ("rope_scaling", {"rope_type": "linear", "factor": 2}),
        ("rope_scaling", None),
        ("swiglu_limit", "10"),
        ("rms_norm_eps", float("nan")),
        ("sliding_window", 12.5),
    ],
)
def test_unsupported_values_are_named(key: str, value: object) -> None:
    assert key in problem_with(changed(**{key: value}))


def test_contradicting_roles_are_explained() -> None:
    text = problem_with(changed(index_source_layer_ids=[2, 8, 14]))
    assert "layer 20 reads KV of layer 20 by the older selection of layer 14" in text


@pytest.mark.parametrize("block", ["text_config", "quantization_config"])
def test_missing_objects(block: str) -> None:
    values = copy.deepcopy(RELEASED_CONFIG)
    del values[block]
    assert f"{block}=<missing>" in problem_with(values)


def test_accepted_spellings_and_defaults() -> None:
    values = changed(engram_pad_token_id=..., engram_pad_id=2, hc_shifted=True, use_fp4_sparse_kv=True)
    values["text_config"]["index_k_source_layer_ids"] = [2, 8, 14, 20]
    values["text_config"]["compress_ratios"] = RELEASED_CONFIG["text_config"]["compress_ratios"][:40]
    del values["quantization_config"]["expert_dtype"]
    config = ModelConfig.from_json(values)
    assert config.text.engram_pad_token_id == 2
    assert config.expert_dtype == "fp4"


def test_text_only_config() -> None:
    values = changed()
    del values["vision_config"], values["image_token_id"]
    assert ModelConfig.from_json(values).vision.num_hidden_layers == 0


def test_unknown_keys_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    values = changed(surprise=1)
    values["quantization_config"]["other"] = 2
    with caplog.at_level(logging.INFO, logger="abyssal.config.reader"):
        ModelConfig.from_json(values)
    (record,) = caplog.records
    assert "text_config.surprise, quantization_config.other" in record.getMessage()


def test_released_config_leaves_nothing_unread(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="abyssal.config.reader"):
        released_config()
    assert not caplog.records
