"""Roundings. Contracts: `abyssal.ops.quantize`; tensors are bfloat16 or float32 and keep their type."""

from __future__ import annotations

import torch

from .build import library

FP8_GROUP = 32


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[-1] % FP8_GROUP == 0, f"width {x.shape[-1]} is no multiple of the group {FP8_GROUP}"
    assert x.dtype in (torch.bfloat16, torch.float32), f"cannot round {x.dtype}"
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        library("rows").call("round_rows_fp8", x.data_ptr(), out.data_ptr(), x.numel(), x.dtype == torch.bfloat16)
    return out
