"""Random matrices in stored formats, of bytes drawn at random so that every code occurs."""

from __future__ import annotations

import pytest
import torch

from abyssal.ops.moe import StoredExpert
from abyssal.quant.formats import StoredMatrix


def make_matrix(format: str, rows: int, columns: int, seed: int) -> StoredMatrix:
    """A matrix whose values are around 0.1, whatever the format."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    if format == "fp8_tiles":
        data = draw(0, 256, rows, columns)
        data[data & 127 == 127] = 3  # not a number
        return StoredMatrix("w", format, data, draw(116, 121, rows // 32, columns // 32), rows, columns)
    if format == "fp4_rows":
        return StoredMatrix(
            "w", format, draw(0, 256, rows, columns // 2), draw(120, 125, rows, columns // 32), rows, columns
        )
    data = torch.randn(rows, columns, generator=generator) * 0.1
    data = data.bfloat16() if format == "bf16" else data
    return StoredMatrix("w", format, data, None, rows, columns)


def make_expert(format: str, hidden: int, width: int, seed: int) -> StoredExpert:
    return StoredExpert(
        make_matrix(format, width, hidden, seed),
        make_matrix(format, width, hidden, seed + 1),
        make_matrix(format, hidden, width, seed + 2),
    )


def error_norm(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((got.double().cpu() - want.double().cpu()).norm() / want.double().norm())


@pytest.fixture(scope="session")
def random_matrix():
    return make_matrix


@pytest.fixture(scope="session")
def random_expert():
    return make_expert


@pytest.fixture(scope="session")
def relative_error():
    return error_norm
