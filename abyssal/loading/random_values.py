"""Random parameters at magnitudes that keep activations finite and every mechanism busy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quant.convert import encode_fp4_rows, encode_fp8_rows, encode_fp8_tiles


@dataclass(frozen=True)
class Spread:
    """A normal distribution."""

    std: float
    mean: float = 0.0


_BY_SUFFIX = (
    (("q_weight", "k_weight"), Spread(0.05, 1.0)),
    (("norm.weight", "norm1.weight", "norm2.weight"), Spread(0.02, 1.0)),
    (("hc_attn_fn", "hc_ffn_fn"), Spread(0.02)),
    (("hc_attn_scale", "hc_ffn_scale"), Spread(0.05, 0.5)),
    (("hc_attn_base", "hc_ffn_base", "attn_sink", "gate.bias", "gate.bias_vl", "indexer.wk.weight"), Spread(0.1)),
    (("markov_head.embed.weight", "markov_head.head.weight"), Spread(0.3)),
    (("embed.weight", "image_start", "image_end", "image_newline"), Spread(0.5)),
    (("head.weight",), Spread(0.08)),
    (("wq_b.weight",), Spread(0.15)),
    (("patch_embed.proj.weight",), Spread(0.02)),
)


def spread(name: str) -> Spread:
    """The distribution of a tensor's values, by its name."""
    for suffixes, found in _BY_SUFFIX:
        if name.endswith(suffixes):
            return found
    if ".ffn.experts." in name:
        return Spread(0.08)
    if name.startswith("vision.blocks.") and name.endswith(".weight"):
        return Spread(0.1)
    return Spread(0.05)


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """float32 values of a tensor; `shape` is that of the values, twice as wide as packed FP4."""
    chosen = spread(name)
    return torch.randn(*shape, generator=generator) * chosen.std + chosen.mean


def draw_stored(
    name: str, dtype: str, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tensor in its stored dtype and shape, and its scale if the format has one. FP8, E8M0 and I8 are uint8."""
    if dtype == "I8":
        return encode_fp4_rows(draw(name, (shape[0], 2 * shape[1]), generator))
    values = draw(name, shape, generator)
    if dtype == "F8_E4M3":
        return (encode_fp8_rows if name.endswith("engram.embed.weight") else encode_fp8_tiles)(values)
    return (values.bfloat16() if dtype == "BF16" else values), None
