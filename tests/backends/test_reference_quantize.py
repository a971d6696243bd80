"""The roundings against brute force: the nearest value of a written-out grid, ties by code, scales from float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from abyssal.backends.cpu.quantize import round_fp4, round_fp8

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]


def nearest(grid: list[float], value: float) -> float:
    """Nearest grid value of the same sign, the even code on ties."""
    distance, _, found = min((abs(abs(value) - g), code % 2, g) for code, g in enumerate(grid))
    assert distance >= 0
    return math.copysign(found, value)


def test_grid_of_e4m3_is_complete():
    assert len(E4M3) == 127
    assert E4M3[-1] == 448.0


def samples(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(300, width, generator=generator) * 10 ** float(e) for e in range(-6, 6)]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, 0.0, -0.0, 17.0, 19.0, 448.0])
    rows.append(ties.repeat(width // 16)[None, :width] * torch.tensor([[1.0], [0.5], [2.0], [1e-30], [1e-5], [1e20]]))
    rows.append(torch.zeros(1, width))
    return torch.cat(rows)


def test_round_fp8():
    x = samples(32)
    got = round_fp8(x).numpy()
    for row, result in zip(x.numpy(), got, strict=True):
        amax = max(np.abs(row).max(), np.float32(1e-4))
        scale = 2.0 ** math.ceil(math.log2(np.float32(amax * np.float32(1 / 448))))
        wanted = [nearest(E4M3, v / scale) * scale for v in row.astype(np.float64)]
        assert result.tolist() == wanted


@pytest.mark.parametrize("fmt", ["e4m3", "ue8m0"])
def test_round_fp4(fmt):
    group = 16 if fmt == "e4m3" else 32
    x = samples(group)
    got = round_fp4(x, group, fmt).numpy()
    for row, result in zip(x.numpy(), got, strict=True):
        amax = np.abs(row).max()
        sixth = np.float32(1 / 6)
        if fmt == "e4m3":
            scale = nearest(E4M3, float(min(np.float32(448), max(amax, np.float32(6 * 2.0**-9)) * sixth)))
            scaled = row * np.float32(1 / np.float32(scale))
        else:
            scale = 2.0 ** math.ceil(math.log2(max(amax, np.float32(6 * 2.0**-126)) * sixth))
            scaled = row.astype(np.float64) / scale
        wanted = [nearest(E2M1, min(6.0, max(-6.0, float(v)))) * scale for v in scaled]
        assert result.tolist() == wanted


def test_rounding_twice_changes_nothing():
    x = samples(32)
    for rounding in (round_fp8, lambda v: round_fp4(v, 32, "ue8m0")):
        once = rounding(x)
        assert torch.equal(rounding(once), once)
