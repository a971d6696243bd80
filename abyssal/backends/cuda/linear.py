"""Products. Contracts: `abyssal.ops.linear`.

Inputs are taken as bfloat16. Products with quantised matrices give bfloat16, those with bf16 and f32 matrices float32, which
is what the model goes on with (gate, compressor and head want unrounded sums).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ops.linear import HeldAs, LinearWeight
from ...quant.formats import StoredMatrix
from .build import library
from .gemm import Epilogue, multiply
from .packing import CHUNK_ROWS, PackedMatrix, pack


def prepare_linear(matrices: Sequence[StoredMatrix], held_as: HeldAs) -> LinearWeight:
    """Always packed: decoding costs nothing here."""
    rows, columns = sum(m.out_features for m in matrices), matrices[0].in_features
    if matrices[0].format == "f32":
        return LinearWeight(rows, columns, torch.cat([m.data.to("cuda") for m in matrices]))
    return LinearWeight(rows, columns, pack(matrices))


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    if isinstance(weight.handle, torch.Tensor):
        return _linear_f32(x, weight.handle)
    return _product(x, weight.handle, x_groups=1, groups=1)


def grouped_linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    packed, groups = weight.handle, x.shape[1]
    assert isinstance(packed, PackedMatrix), "grouped products take quantised or bf16 matrices"
    rows = weight.out_features // groups
    if rows % CHUNK_ROWS == 0:
        return _product(x.flatten(1), packed, x_groups=groups, groups=groups)
    # groups that cut chunks: all rows for each group's input, of which its own are kept
    parts = [_product(x[:, g], packed, x_groups=1, groups=1)[:, g * rows : (g + 1) * rows] for g in range(groups)]
    return torch.cat(parts, 1)


def _product(x: torch.Tensor, packed: PackedMatrix, x_groups: int, groups: int) -> torch.Tensor:
    x = x.to(torch.bfloat16).contiguous()
    epilogue: Epilogue = "f32" if packed.format == "bf16" else "bf16"
    dtype = torch.float32 if epilogue == "f32" else torch.bfloat16
    out = torch.empty(x.shape[0], packed.out_features, dtype=dtype, device=x.device)
    if len(x):
        multiply(packed, x, out, epilogue, x_groups=x_groups, groups=groups)
    return out


def _linear_f32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    assert x.dtype in (torch.bfloat16, torch.float32), f"cannot multiply {x.dtype}"
    rows, columns = weight.shape
    out = torch.empty(x.shape[0], rows, device=x.device)
    if len(x):
        is_bf16 = x.dtype == torch.bfloat16
        library("rows").call("linear_f32", x.data_ptr(), weight.data_ptr(), out.data_ptr(), len(x), rows, columns, is_bf16)
    return out
