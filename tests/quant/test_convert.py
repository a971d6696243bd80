"""Stored formats against their definitions: torch's own FP8 types, brute force over codes, and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from abyssal.quant import convert
from abyssal.quant.formats import StoredMatrix

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def random_bytes(*shape: int, high: int = 256, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def matrix(fmt: str, rows: int, columns: int) -> StoredMatrix:
    data = random_bytes(rows, columns if fmt == "fp8_tiles" else columns // 2)
    if fmt == "fp8_tiles":
        data[(data & 127) == 127] = 0  # NaN codes
    scale_rows = rows // 32 if fmt == "fp8_tiles" else rows
    return StoredMatrix("m", fmt, data, random_bytes(scale_rows, columns // 32, low=100, high=150), rows, columns)  # type: ignore[arg-type]


def test_e4m3_table_is_torchs() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(convert.e4m3_table().nan_to_num(1e9), theirs.nan_to_num(1e9))
    assert torch.equal(torch.signbit(convert.e4m3_table()[:127]), torch.signbit(theirs[:127]))
    assert torch.signbit(convert.e4m3_table()[128])


def test_e8m0_table_is_powers_of_two() -> None:
    table = convert.decode_scales(torch.tensor([[0, 1, 126, 127], [128, 200, 254, 255]], dtype=torch.uint8))
    assert table[:, :3].tolist() == [[2.0**-127, 2.0**-126, 0.5], [2.0, 2.0**73, 2.0**127]]
    assert table[0, 3] == 1.0
    assert math.isnan(table[1, 3])


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (1088, 1024)])
def test_decode_fp8_tiles_is_exact(shape: tuple[int, int]) -> None:
    m = matrix("fp8_tiles", *shape)
    assert m.scale is not None
    expected = m.data.view(torch.float8_e4m3fn).double()
    exponent = (m.scale.double() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(convert.decode(m).double(), expected * torch.exp2(exponent))


@pytest.mark.parametrize("shape", [(3, 32), (40, 96), (1100, 1024)])
def test_decode_fp4_rows_is_exact(shape: tuple[int, int]) -> None:
    m = matrix("fp4_rows", *shape)
    assert m.scale is not None
    codes = torch.stack((m.data & 15, m.data >> 4), -1).flatten(1).long()
    expected = torch.tensor(E2M1, dtype=torch.float64)[codes]
    exponent = (m.scale.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(convert.decode(m).double(), expected * torch.exp2(exponent))


def test_low_nibble_is_the_even_column() -> None:
    m = StoredMatrix(
        "m", "fp4_rows", torch.full((1, 16), 0x72, dtype=torch.uint8), torch.full((1, 1), 128, dtype=torch.uint8), 1, 32
    )
    assert convert.decode(m)[0, :2].tolist() == [2.0, 12.0]


def test_decode_writes_into_out_and_of_parts_equals_parts_of_whole() -> None:
    m = matrix("fp8_tiles", 96, 64)
    whole = convert.decode(m)
    out = torch.full((32, 64), 7.0)
    assert convert.decode(m.rows(32, 64), out) is out
    assert torch.equal(out, whole[32:64])
    four = matrix("fp4_rows", 9, 64)
    assert torch.equal(convert.decode(four.rows(3, 5)), convert.decode(four)[3:5])


def test_decode_wide_types_unchanged() -> None:
    values = torch.randn(4, 8)
    assert torch.equal(convert.decode(StoredMatrix("m", "f32", values, None, 4, 8)), values)
    narrow = values.bfloat16()
    assert torch.equal(convert.decode(StoredMatrix("m", "bf16", narrow, None, 4, 8)), narrow.float())


def test_decode_engram_rows() -> None:
    data, scale = random_bytes(5, 64), random_bytes(5, 2, low=110, high=140)
    data[(data & 127) == 127] = 1
    expected = data.view(torch.float8_e4m3fn).double() * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(convert.decode_rows_fp8(data, scale).double(), expected)


@pytest.mark.parametrize("limit", [448.0, 6.0])
def test_exponent_is_the_least_that_fits(limit: float) -> None:
    edges = torch.tensor([limit * 2.0**k for k in (-20, -3, 0, 5)])
    amax = torch.cat(
        (edges, torch.nextafter(edges, torch.tensor(0.0)), torch.nextafter(edges, torch.tensor(1e30)), torch.rand(100))
    )
    e = convert.exponent_for(amax, limit)
    assert (amax.double() <= limit * torch.exp2(e.double())).all()
    assert (amax.double() > limit * torch.exp2(e.double() - 1)).all()
    assert convert.exponent_for(torch.zeros(1), limit).item() == -127


def test_encode_fp8_keeps_values_on_the_grid_and_rounds_others_to_nearest() -> None:
    m = matrix("fp8_tiles", 64, 64)
    values = convert.decode(m)
    data, scale = convert.encode_fp8_tiles(values)
    assert torch.equal(convert.decode(StoredMatrix("m", "fp8_tiles", data, scale, 64, 64)), values)
    rough = torch.randn(32, 32)
    data, scale = convert.encode_fp8_tiles(rough)
    step = 2.0 ** (scale.item() - 127)
    grid = convert.e4m3_table()[:127].double() * step
    nearest = (rough.abs().double().unsqueeze(-1) - grid).abs().amin(-1)
    got = convert.decode(StoredMatrix("m", "fp8_tiles", data, scale, 32, 32)).double()
    assert torch.equal((rough.double() - got).abs(), nearest)


def test_encode_fp8_rows_round_trip() -> None:
    data, scale = random_bytes(7, 96), random_bytes(7, 3, low=110, high=140)
    data[(data & 127) == 127] = 1
    values = convert.decode_rows_fp8(data, scale)
    assert torch.equal(convert.decode_rows_fp8(*convert.encode_fp8_rows(values)), values)


def test_encode_fp4_rows_round_trip_and_ties_go_down() -> None:
    values = convert.decode(matrix("fp4_rows", 12, 64))
    data, scale = convert.encode_fp4_rows(values)
    assert torch.equal(convert.decode(StoredMatrix("m", "fp4_rows", data, scale, 12, 64)), values)
    ties = torch.zeros(1, 32)
    ties[0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5.0])
    data, scale = convert.encode_fp4_rows(ties)
    assert scale.item() == 127
    got = convert.decode(StoredMatrix("m", "fp4_rows", data, scale, 1, 32))
    assert got[0, :8].tolist() == [6.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, -4.0]


def test_encode_all_zero_tile() -> None:
    data, scale = convert.encode_fp8_tiles(torch.zeros(32, 32))
    assert not data.any()
    assert scale.item() == 0


def test_stored_matrix_refuses_a_scale_of_the_wrong_shape() -> None:
    with pytest.raises(AssertionError, match="fp8_tiles"):
        StoredMatrix("m", "fp8_tiles", random_bytes(64, 64), random_bytes(64, 2), 64, 64)
