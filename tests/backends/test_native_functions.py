"""What native kernels are made of: elementary functions against float64, threads, forks, and arrays of many experts."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from abyssal.backends.cpu import native
from abyssal.backends.cpu.native.kernels import Kernels, bind
from abyssal.backends.cpu.table import REFERENCE
from abyssal.core.batch import DraftBatch
from abyssal.ops.linear import LinearWeight
from abyssal.ops.moe import StoredExpert
from abyssal.ops.norm_rope import RotaryRows
from abyssal.quant.convert import encode_fp4_rows, encode_fp8_tiles
from abyssal.quant.formats import StoredMatrix

VARIANTS = [v for v in native.runnable_variants() if native.library_path(v)]


@pytest.fixture(scope="module", params=VARIANTS or [None])
def library(request):
    if request.param is None:
        pytest.skip("no native library was built")
    library = native.load(request.param)
    library.abyssal_set_num_threads(1)
    return library


def rand(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def apply(library, function: int, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    call, pack = bind(library, "elementary", "qPqP")
    call(pack(function, x.data_ptr(), x.numel(), out.data_ptr()))
    return out


def grid(low: float, high: float) -> torch.Tensor:
    """Values across a range, and both sides of zero down to the smallest."""
    small = 10.0 ** torch.linspace(-40, 0, 4096)
    return torch.cat((torch.linspace(low, high, 1 << 18), small, -small)).float()


def worst_ulp(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error in units of the last place of the wanted float64 values."""
    _, exponent = torch.frexp(wanted)
    ulp = torch.ldexp(torch.ones_like(wanted), (exponent - 24).clamp_min(-149))
    return float(((got.double() - wanted).abs() / ulp).max())


def exact_softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


@pytest.mark.parametrize(
    ("function", "exact", "low", "high", "bound"),
    [
        (0, torch.exp, -103.0, 88.7, 2.0),
        (1, torch.sigmoid, -87.0, 100.0, 4.0),
        (2, torch.nn.functional.silu, -80.0, 100.0, 4.0),
        (3, exact_softplus, -100.0, 100.0, 0.50001),
    ],
)
def test_elementary_functions(library, function, exact, low, high, bound):
    x = grid(low, high)
    assert worst_ulp(apply(library, function, x), exact(x.double())) <= bound


def test_elementary_functions_at_the_ends(library):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 89.0, -104.0, -1e30] * 2)
    assert apply(library, 0, x)[1:8].tolist() == [torch.inf, 0.0, 1.0, 1.0, torch.inf, 0.0, 0.0]
    assert apply(library, 1, x)[1:3].tolist() == [1.0, 0.0]
    assert apply(library, 3, x)[1:3].tolist() == [torch.inf, 0.0]
    assert all(apply(library, f, x)[0].isnan() for f in range(4))


def test_what_is_no_number_stays_so(library):
    kernels = Kernels(library)
    x = rand(2, 64)
    x[0, 5] = torch.nan
    for rounded in (kernels.round_fp8(x), kernels.round_fp4(x, 16, "e4m3"), kernels.round_fp4(x, 32, "ue8m0")):
        assert rounded[0, 5].isnan()
        assert rounded[1].isfinite().all()


@pytest.mark.parametrize("block_rows", [1, 5])
def test_block_attention(library, block_rows):
    starts = torch.tensor([0, 3, 40, 41], dtype=torch.int32)
    rows, heads, width = len(starts) * block_rows, 6, 64
    positions = (starts.unsqueeze(1) + torch.arange(block_rows, dtype=torch.int32)).flatten()
    batch = DraftBatch(positions, positions, starts, torch.tensor([2, 0, 1, 3], dtype=torch.int32), 64)
    q, kv, ring, sink = rand(rows, heads, width), rand(rows, width, seed=1), rand(4, 24, width, seed=2), rand(heads)
    angles = torch.arange(64).unsqueeze(1) * 0.7 ** torch.arange(8)
    arguments = (sink, batch, 16, RotaryRows(angles.cos(), angles.sin()))
    got = Kernels(library).block_attention(q, kv, ring, *arguments)
    wanted = REFERENCE["block_attention"](q, kv, ring, *arguments)
    assert (got - wanted).norm() < 2e-6 * wanted.norm()


def experts_of(count: int, hidden: int, inner: int) -> list[StoredExpert]:
    def matrix(rows: int, columns: int, seed: int) -> StoredMatrix:
        encode = encode_fp4_rows if seed % 2 else encode_fp8_tiles
        data, scale = encode(rand(rows, columns, seed=seed, std=0.1))
        return StoredMatrix("w", "fp4_rows" if seed % 2 else "fp8_tiles", data.view(torch.uint8), scale, rows, columns)

    return [
        StoredExpert(matrix(inner, hidden, 3 * e), matrix(inner, hidden, 3 * e + 1), matrix(hidden, inner, 3 * e + 2))
        for e in range(count)
    ]


@pytest.mark.parametrize("held_as", ["decoded", "packed"])
def test_as_many_experts_as_the_released_model_has(library, held_as):
    kernels = Kernels(library)
    *routed, shared = experts_of(385, 64, 32)
    x, bias = rand(9, 64), rand(384, seed=1, std=0.1)
    gate = StoredMatrix("gate", "f32", rand(384, 64, seed=2), None, 384, 64)
    ids, weights = kernels.route(x, kernels.prepare_linear([gate], held_as), bias, 6, 1.5)
    wanted_ids, wanted_weights = REFERENCE["route"](x, LinearWeight(384, 64, gate.data), bias, 6, 1.5)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted_weights, rtol=1e-6)
    got = kernels.experts(x, ids, weights, kernels.prepare_experts(routed, shared, held_as), 10.0, False)
    wanted = REFERENCE["experts"](x, ids, weights, REFERENCE["prepare_experts"](routed, shared, "decoded"), 10.0, False)
    assert (got - wanted).norm() < 2e-6 * wanted.norm()


def test_loops_of_several_callers_do_not_mix(library):
    """Engines in threads of their own share the kernels' threads."""
    kernels = Kernels(library)
    weight = kernels.prepare_linear([StoredMatrix("w", "f32", rand(256, 512), None, 256, 512)], "decoded")
    inputs = [rand(33, 512, seed=s) for s in range(4)]
    wanted = [kernels.linear(x, weight) for x in inputs]
    equal = [True] * len(inputs)

    def repeat(i: int) -> None:
        for _ in range(50):
            equal[i] &= torch.equal(kernels.linear(inputs[i], weight), wanted[i])

    library.abyssal_set_num_threads(3)
    callers = [threading.Thread(target=repeat, args=(i,)) for i in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    library.abyssal_set_num_threads(1)
    assert all(equal)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_computes_the_same(library):
    """Threads do not survive a fork; the child works alone, or with as many threads as it asks for."""
    kernels = Kernels(library)
    library.abyssal_set_num_threads(3)
    weight = kernels.prepare_linear([StoredMatrix("w", "f32", rand(256, 512), None, 256, 512)], "decoded")
    x = rand(33, 512)
    wanted = kernels.linear(x, weight)
    child = os.fork()
    if child == 0:
        alone = torch.equal(kernels.linear(x, weight), wanted)
        library.abyssal_set_num_threads(2)
        os._exit(0 if alone and torch.equal(kernels.linear(x, weight), wanted) else 1)
    _, status = os.waitpid(child, 0)
    library.abyssal_set_num_threads(1)
    assert os.waitstatus_to_exitcode(status) == 0
