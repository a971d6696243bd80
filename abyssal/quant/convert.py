"""Stored formats to float32 without loss, and float32 into stored formats.

Decoding looks bytes up in tables made here from the definition of the formats. FP8 is looked up two elements at a time,
which is as fast as memory on most machines.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

from .formats import SCALE_GROUP, StoredMatrix

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCRATCH_ELEMENTS = 1 << 20
"""Elements decoded at a time, so that index scratch stays at a few megabytes whatever the matrix."""


def _e4m3(byte: int) -> float:
    exponent, fraction = byte >> 3 & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    magnitude = math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10)
    return -magnitude if byte & 128 else magnitude


def _e2m1(code: int) -> float:
    magnitude = E2M1_MAGNITUDES[code & 7]
    return -magnitude if code & 8 else magnitude


@functools.cache
def e4m3_table() -> torch.Tensor:
    """Value of each e4m3 byte: float32 [256]."""
    return torch.tensor([_e4m3(b) for b in range(256)])


@functools.cache
def e8m0_table() -> torch.Tensor:
    """Value of each scale byte, 2^(b - 127): float32 [256]; 255 is NaN."""
    return torch.tensor([math.ldexp(1.0, b - 127) for b in range(255)] + [math.nan])


@functools.cache
def e2m1_pair_table() -> torch.Tensor:
    """Both values of each byte of FP4: float32 [256, 2], low nibble first."""
    return torch.tensor([(_e2m1(b & 15), _e2m1(b >> 4)) for b in range(256)])


@functools.cache
def _e4m3_pairs() -> torch.Tensor:
    """Two values, bit-cast to one int64, for each pair of bytes read as a little-endian number."""
    table = e4m3_table()
    low = table.repeat(256)
    high = table.repeat_interleave(256)
    return torch.stack((low, high), 1).view(torch.int64).flatten()


@functools.cache
def _e2m1_pairs() -> torch.Tensor:
    return e2m1_pair_table().view(torch.int64).flatten()


def _decode_e4m3(data: torch.Tensor, out: torch.Tensor) -> None:
    pairs = data.contiguous().view(torch.int16).flatten().to(torch.int32) & 0xFFFF
    torch.index_select(_e4m3_pairs(), 0, pairs, out=out.view(torch.int64).flatten())


def _decode_e2m1(data: torch.Tensor, out: torch.Tensor) -> None:
    torch.index_select(_e2m1_pairs(), 0, data.flatten().to(torch.int32), out=out.view(torch.int64).flatten())


def decode_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scale bytes of any shape to float32 powers of two."""
    return e8m0_table().index_select(0, scale.flatten().to(torch.int32)).view(scale.shape)


def decode(matrix: StoredMatrix, out: torch.Tensor | None = None) -> torch.Tensor:
    """The values of a matrix, exactly: float32 [N, K].

    Args:
        out: contiguous float32 [N, K] to write into instead of a new tensor.
    """
    if out is None:
        out = torch.empty(matrix.out_features, matrix.in_features)
    assert out.is_contiguous(), f"{matrix.name}: cannot decode into a strided tensor"
    if matrix.scale is None:
        return out.copy_(matrix.data)
    step = max(SCALE_GROUP, SCRATCH_ELEMENTS // matrix.in_features // SCALE_GROUP * SCALE_GROUP)
    for start in range(0, matrix.out_features, step):
        stop = min(start + step, matrix.out_features)
        _decode_part(matrix.rows(start, stop), out[start:stop])
    return out


def _decode_part(matrix: StoredMatrix, out: torch.Tensor) -> None:
    assert matrix.scale is not None, f"{matrix.name} has no scale"
    scale = decode_scales(matrix.scale)
    if matrix.format == "fp8_tiles":
        _decode_e4m3(matrix.data, out)
        out.view(-1, SCALE_GROUP, scale.shape[1], SCALE_GROUP).mul_(scale[:, None, :, None])
    else:
        _decode_e2m1(matrix.data, out)
        out.view(*scale.shape, SCALE_GROUP).mul_(scale.unsqueeze(-1))


def decode_rows_fp8(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows with one scale for 32 channels (Engram tables): e4m3 bytes [R, K] and scale bytes [R, K/32] to float32 [R, K]."""
    out = torch.empty(data.shape)
    _decode_e4m3(data, out)
    out.view(*scale.shape, SCALE_GROUP).mul_(decode_scales(scale).unsqueeze(-1))
    return out


def exponent_for(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """Smallest e with amax <= limit * 2^e, exactly, as int32; of zero, the least that a scale byte can express."""
    fraction, exponent = torch.frexp(amax)
    limit_fraction, limit_exponent = math.frexp(limit)
    e = exponent - limit_exponent + (fraction > limit_fraction).to(torch.int32)
    return torch.where(amax == 0, -127, e).clamp(-127, 127)


def _scaled(groups: torch.Tensor, dims: tuple[int, ...], limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups over `dims` divided by their power-of-two scale, and the scale bytes.

    The exponent is the ceiling of the logarithm as float32: a maximum that exceeds the limit by its last bit is rounded down
    to it rather than given twice the scale.
    """
    amax = groups.abs().amax(dims, keepdim=True)
    exponent = torch.ceil(torch.log2((amax / limit).double()).float()).clamp(-127, 127).to(torch.int32)
    scale = (exponent + 127).to(torch.uint8)
    return groups / decode_scales(scale), scale


def encode_fp8_tiles(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 [N, K] to e4m3 bytes [N, K] and scale bytes [N/32, K/32]."""
    rows, columns = values.shape
    tiles = values.view(rows // SCALE_GROUP, SCALE_GROUP, columns // SCALE_GROUP, SCALE_GROUP)
    scaled, scale = _scaled(tiles, (1, 3), E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(rows, columns), scale[:, 0, :, 0].contiguous()


def encode_fp8_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 [R, K] to e4m3 bytes [R, K] and scale bytes [R, K/32]."""
    scaled, scale = _scaled(values.view(len(values), -1, SCALE_GROUP), (2,), E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(values.shape), scale[:, :, 0].contiguous()


def encode_fp4_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 [N, K] to pairs of e2m1 [N, K/2] and scale bytes [N, K/32]. A tie goes to the smaller magnitude."""
    scaled, scale = _scaled(values.view(len(values), -1, SCALE_GROUP), (2,), E2M1_MAX)
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1_MAGNITUDES)])
    codes = e2m1_codes(scaled.view(values.shape), middles)
    return pack_nibbles(codes), scale[:, :, 0].contiguous()


def e2m1_codes(values: torch.Tensor, upper_bounds: torch.Tensor) -> torch.Tensor:
    """e2m1 codes, uint8: the magnitude's index among the bounds (float32 [7], each belonging below), and the sign."""
    return torch.bucketize(values.abs(), upper_bounds).to(torch.uint8) | torch.signbit(values).to(torch.uint8) << 3


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes [.., K] below 16 to bytes [.., K/2], the even element in the low nibble."""
    return codes[..., ::2] | codes[..., 1::2] << 4
