"""Products in plain torch. Contracts: `abyssal.ops.linear`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...ops.linear import HeldAs, LinearWeight
from ...quant.convert import decode
from ...quant.formats import StoredMatrix


def dense(weight: LinearWeight) -> torch.Tensor:
    """The matrix as float32 [out, in]; decoded here if it is held packed."""
    if isinstance(weight.handle, torch.Tensor):
        return weight.handle
    return torch.cat([decode(m) for m in weight.handle])


def prepare_linear(matrices: Sequence[StoredMatrix], held_as: HeldAs) -> LinearWeight:
    packed = LinearWeight(sum(m.out_features for m in matrices), matrices[0].in_features, tuple(matrices))
    if held_as == "packed":
        return packed
    return LinearWeight(packed.out_features, packed.in_features, dense(packed))


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    return F.linear(x, dense(weight))


def grouped_linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    groups = x.shape[1]
    matrix = dense(weight).view(groups, -1, x.shape[2])
    return torch.einsum("tgk,grk->tgr", x, matrix).flatten(1)
