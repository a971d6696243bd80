"""Roundings in plain torch. Contracts: `abyssal.ops.quantize`."""

from __future__ import annotations

import torch

from ...ops.quantize import ScaleFormat

FP8_GROUP = 32
FP8_MAX = 448.0
FP4_MAX = 6.0


def exponent_at_least(value: torch.Tensor) -> torch.Tensor:
    """Smallest e with 2^e >= value, for positive normal float32, as int32."""
    return ((value.view(torch.int32) - 1) >> 23) + 1 - 127


def _groups(x: torch.Tensor, group: int) -> torch.Tensor:
    assert x.shape[-1] % group == 0, f"width {x.shape[-1]} is no multiple of the group {group}"
    return x.view(*x.shape[:-1], -1, group)


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    groups = _groups(x, FP8_GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.ldexp(torch.ones_like(amax), exponent_at_least(amax * (1.0 / FP8_MAX)))
    scaled = (groups / scale).clamp(-FP8_MAX, FP8_MAX)
    return (scaled.to(torch.float8_e4m3fn).float() * scale).view(x.shape)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign kept. Half-to-even in each binade is ties to the even code."""
    magnitude = x.abs().clamp_max(FP4_MAX)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, x)


def round_fp4(x: torch.Tensor, group: int, scale: ScaleFormat) -> torch.Tensor:
    groups = _groups(x, group)
    amax = groups.abs().amax(-1, keepdim=True)
    if scale == "e4m3":
        # a float32 product with the constant 1/6, and a reciprocal rather than a division: the trained kernels' order
        wanted = (amax.clamp_min(FP4_MAX * 2.0**-9) * (1.0 / FP4_MAX)).clamp_max(FP8_MAX)
        step = wanted.to(torch.float8_e4m3fn).float()
        return (_round_e2m1(groups * (1.0 / step)) * step).view(x.shape)
    exponent = exponent_at_least(amax.clamp_min(FP4_MAX * 2.0**-126) * (1.0 / FP4_MAX))
    step = torch.ldexp(torch.ones_like(amax), exponent)
    return (_round_e2m1(groups / step) * step).view(x.shape)
