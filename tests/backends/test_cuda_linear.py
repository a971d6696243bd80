"""Products on the card against the CPU's, and rows that do not depend on their batch."""

from __future__ import annotations

import pytest
import torch

from abyssal.backends.cpu import linear as reference
from abyssal.backends.cuda import linear as cuda
from abyssal.backends.cuda import quantize
from abyssal.core.errors import CheckpointError
from abyssal.quant.formats import StoredMatrix

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")]

LIMIT = 4e-3
BATCHES = (1, 2, 3, 8, 15, 16, 17, 33, 64, 128)


def rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("format", ["fp8_tiles", "fp4_rows", "bf16", "f32"])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 128), (96, 320), (512, 1280), (2592, 640)])
@pytest.mark.parametrize("count", [1, 7, 16, 50, 64, 130, 1000])
def test_linear(random_matrix, relative_error, format, out_features, in_features, count):
    matrix = random_matrix(format, out_features, in_features, seed=count)
    x = rows(count, in_features, seed=count)
    got = cuda.linear(x.cuda(), cuda.prepare_linear([matrix], "packed"))
    want = reference.linear(x.float(), reference.prepare_linear([matrix], "decoded"))
    assert got.dtype == (torch.bfloat16 if matrix.scale is not None else torch.float32)
    assert relative_error(got, want) < (LIMIT if matrix.scale is not None else 1e-5)


def test_every_fp8_code_with_every_shift_is_exact():
    data = torch.arange(256, dtype=torch.uint8).repeat(32, 1)
    data[data & 127 == 127] = 0
    scale = torch.arange(100, 108, dtype=torch.uint8)[None]
    matrix = StoredMatrix("w", "fp8_tiles", data, scale, 32, 256)
    want = reference.dense(reference.prepare_linear([matrix], "decoded"))
    got = cuda.linear(torch.eye(256).bfloat16().cuda(), cuda.prepare_linear([matrix], "packed"))
    assert torch.equal(got.float().cpu(), want.t())


def test_every_fp4_code_with_many_scales_is_exact():
    data = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    scale = torch.arange(64 * 16, dtype=torch.int32).remainder(120).add(70).to(torch.uint8).view(64, 16)
    matrix = StoredMatrix("w", "fp4_rows", data, scale, 64, 512)
    want = reference.dense(reference.prepare_linear([matrix], "decoded"))
    got = cuda.linear(torch.eye(512).bfloat16().cuda(), cuda.prepare_linear([matrix], "packed"))
    assert torch.equal(got.float().cpu(), want.t())


@pytest.mark.parametrize("byte", [193, 255])
def test_absurd_scales_are_refused(random_matrix, byte):
    matrix = random_matrix("fp4_rows", 64, 128, seed=1)
    matrix.scale[3, 1] = byte
    with pytest.raises(CheckpointError, match="scale"):
        cuda.prepare_linear([matrix], "packed")


def test_stacked_matrices(random_matrix, relative_error):
    parts = [random_matrix("fp8_tiles", n, 256, seed=n) for n in (96, 32, 160)]
    x = rows(5, 256)
    got = cuda.linear(x.cuda(), cuda.prepare_linear(parts, "packed"))
    want = reference.linear(x.float(), reference.prepare_linear(parts, "decoded"))
    assert relative_error(got, want) < LIMIT


@pytest.mark.parametrize(("groups", "group_rows", "width"), [(8, 128, 256), (4, 64, 96), (2, 32, 64)])
@pytest.mark.parametrize("count", [1, 20, 300])
def test_grouped_linear(random_matrix, relative_error, groups, group_rows, width, count):
    matrix = random_matrix("fp8_tiles", groups * group_rows, width, seed=count)
    x = rows(count * groups, width).view(count, groups, width)
    got = cuda.grouped_linear(x.cuda(), cuda.prepare_linear([matrix], "packed"))
    want = reference.grouped_linear(x.float(), reference.prepare_linear([matrix], "decoded"))
    assert relative_error(got, want) < LIMIT


@pytest.mark.parametrize("format", ["fp8_tiles", "fp4_rows", "bf16", "f32"])
def test_rows_do_not_depend_on_their_batch(random_matrix, format):
    weight = cuda.prepare_linear([random_matrix(format, 2048, 1280, seed=2)], "packed")
    x = rows(2000, 1280).cuda()
    whole = cuda.linear(x, weight)  # tiles for many tokens
    for count in BATCHES:
        for start in (0, 1, 77, 1999 - count):
            assert torch.equal(cuda.linear(x[start : start + count], weight), whole[start : start + count]), (count, start)


def test_rows_of_grouped_products_do_not_depend_on_their_batch(random_matrix):
    weight = cuda.prepare_linear([random_matrix("fp8_tiles", 1024, 512, seed=2)], "packed")
    x = rows(8 * 2000, 512).view(2000, 8, 512).cuda()
    whole = cuda.grouped_linear(x, weight)
    for count in BATCHES:
        assert torch.equal(cuda.grouped_linear(x[5 : 5 + count], weight), whole[5 : 5 + count]), count


def test_no_rows(random_matrix):
    weight = cuda.prepare_linear([random_matrix("fp8_tiles", 64, 128, seed=2)], "packed")
    assert cuda.linear(rows(0, 128).cuda(), weight).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_fp8(dtype):
    from abyssal.backends.cpu.quantize import round_fp8

    x = torch.cat([rows(200, 96, seed=e).float() * 10.0**e for e in range(-7, 7)] + [torch.zeros(1, 96)]).to(dtype)
    got = quantize.round_fp8(x.cuda()).cpu()
    assert got.dtype == dtype
    assert torch.equal(got.float(), round_fp8(x.float()))
