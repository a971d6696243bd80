"""Packed cache rows: sizes, layout by hand, and lossless round trips of values rounded by brute force."""

from __future__ import annotations

import pytest
import torch

from abyssal.quant.cache_rows import CacheRowFormat, compressed_rows, index_rows, window_rows

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    index = (x.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return torch.copysign(E2M1[index], x)


def on_grid(fmt: CacheRowFormat, x: torch.Tensor) -> torch.Tensor:
    """Rounded as the trained model rounds such rows, group by group."""
    groups = x.unflatten(-1, (-1, fmt.group))
    amax = groups.abs().amax(-1, keepdim=True)
    if fmt.scale == "e4m3":
        scale = (amax.clamp_min(6 * 2.0**-9) / 6).clamp_max(448).to(torch.float8_e4m3fn).float()
        return (nearest_e2m1((groups / scale).clamp(-6, 6)) * scale).view_as(x)
    limit, floor = (448.0, 1e-4) if fmt.element == "e4m3" else (6.0, 6 * 2.0**-126)
    scale = torch.exp2(torch.ceil(torch.log2(amax.clamp_min(floor) / limit)))
    if fmt.element == "e4m3":
        return ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).view_as(x)
    return (nearest_e2m1((groups / scale).clamp(-6, 6)) * scale).view_as(x)


@pytest.mark.parametrize(("fmt", "size"), [(window_rows(512), 528), (compressed_rows(512), 288), (index_rows(128), 68)])
def test_sizes_of_the_released_model(fmt: CacheRowFormat, size: int) -> None:
    assert fmt.row_bytes == size


@pytest.mark.parametrize("fmt", [window_rows(64), compressed_rows(64), index_rows(32)], ids=lambda f: f.name)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e-3, 1.0, 300.0, 5000.0])
def test_round_trip_is_lossless(fmt: CacheRowFormat, magnitude: float) -> None:
    x = torch.randn(4, 50, fmt.dim, generator=torch.Generator().manual_seed(3)) * magnitude
    x[0, 0] = 0.0
    values = on_grid(fmt, x)
    packed = fmt.pack(values)
    assert packed.shape == (4, 50, fmt.row_bytes)
    assert packed.dtype == torch.uint8
    assert torch.equal(fmt.unpack(packed), values)


def test_every_scale_and_code_of_compressed_rows_survives() -> None:
    fmt = compressed_rows(16)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    patterns = torch.cat((E2M1, -E2M1)).expand(8, 16).clone()
    for row in range(8):
        patterns[row] = patterns[row].clamp(-E2M1[row], E2M1[row])  # every possible greatest code
    values = (scales[:, None, None] * patterns).view(-1, 16)
    assert torch.equal(fmt.unpack(fmt.pack(values)), values)


def test_layout_is_elements_then_scales() -> None:
    values = torch.zeros(1, 32)
    values[0, 0], values[0, 1], values[0, 31] = 6.0, -0.5, 3.0
    assert index_rows(32).pack(values)[0].tolist() == [0x97, *[0] * 14, 0x50, 127]
    assert compressed_rows(32).pack(values)[0].tolist() == [0x97, *[0] * 14, 0x70, 0x38, 0x30]
    values[0, 0] = 448.0
    assert window_rows(32).pack(values)[0, [0, 1, 31, 32]].tolist() == [0x7E, 0xB0, 0x44, 127]


@pytest.mark.parametrize("fmt", [window_rows(64), compressed_rows(64), index_rows(32)], ids=lambda f: f.name)
def test_values_off_the_grid_are_refused(fmt: CacheRowFormat) -> None:
    with pytest.raises(ValueError, match=fmt.name):
        fmt.pack(torch.randn(2, fmt.dim))
