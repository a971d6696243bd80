"""Norm, rotation and row stores in plain torch. Contracts: `abyssal.ops.norm_rope`."""

from __future__ import annotations

import torch

from ...ops.norm_rope import RotaryRows
from .quantize import round_fp8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, rotary: RotaryRows) -> torch.Tensor:
    cos, sin = rotary.cos[positions.long()], rotary.sin[positions.long()]
    return rotate_tail(x, cos, sin)


def rotate_tail(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last 2 * cos.shape[-1] channels of x [T, (H,) D] by cos, sin [T, rope_dim / 2]."""
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = x.clone()
    tail = out[..., -2 * cos.shape[-1] :].unflatten(-1, (-1, 2))
    a, b = tail[..., 0].clone(), tail[..., 1].clone()
    tail[..., 0] = a * cos - b * sin
    tail[..., 1] = a * sin + b * cos
    return out


def window_rows(
    kv: torch.Tensor, weight: torch.Tensor, eps: float, positions: torch.Tensor, rotary: RotaryRows, rounded: bool
) -> torch.Tensor:
    rows = rotate(rms_norm(kv, weight, eps), positions, rotary)
    return round_fp8(rows) if rounded else rows


def write_rows(storage: torch.Tensor, dst: torch.Tensor, values: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    storage[dst.long()] = values if rows is None else values[rows.long()]
