"""Native kernels against the torch reference, and the promise that a row's bits depend on nothing but that row."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from abyssal.backends.cpu import native
from abyssal.backends.cpu.native.kernels import NATIVE_OPS, Kernels
from abyssal.backends.cpu.table import REFERENCE
from abyssal.core.batch import CompressionPlan, ForwardBatch, RingWrites
from abyssal.ops.engram import EngramHash
from abyssal.ops.hyper_connection import HyperParams
from abyssal.ops.indexer import SelectionRule
from abyssal.ops.linear import LinearWeight
from abyssal.ops.moe import StoredExpert
from abyssal.ops.norm_rope import RotaryRows
from abyssal.quant.convert import decode, encode_fp4_rows, encode_fp8_tiles
from abyssal.quant.formats import StoredMatrix

VARIANTS = [v for v in native.runnable_variants() if native.library_path(v)]
ROWS = [1, 2, 3, 5, 8, 9, 17, 33, 64, 65]

needs_native = pytest.mark.skipif(not VARIANTS, reason="no native library was built")


def test_native_library_is_built_where_it_can_be():
    """A run on a machine with a compiler must not silently test nothing."""
    if not native.runnable_variants() or not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no compiler, or no kernels for this processor")
    assert VARIANTS


@pytest.fixture(scope="module", params=VARIANTS or [None])
def kernels(request) -> Kernels:
    if request.param is None:
        pytest.skip("no native library was built")
    library = native.load(request.param)
    library.abyssal_set_num_threads(1)
    return Kernels(library)


def rand(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def stored(fmt: str, rows: int, columns: int, seed: int = 0) -> StoredMatrix:
    values = rand(rows, columns, seed=seed, std=0.1)
    if fmt == "fp8_tiles":
        data, scale = encode_fp8_tiles(values)
    elif fmt == "fp4_rows":
        data, scale = encode_fp4_rows(values)
    else:
        data, scale = values.to({"bf16": torch.bfloat16, "f32": torch.float32}[fmt]), None
    return StoredMatrix(f"{fmt} matrix", fmt, data.view(torch.uint8) if scale is not None else data, scale, rows, columns)


def make_batch(lengths: list[int], starts: list[int], block_entries: int = 128) -> ForwardBatch:
    """Rows of several requests, with their block tables shuffled."""
    counts = torch.tensor(lengths, dtype=torch.int32)
    query_start = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)))
    request = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), counts.long())
    row = torch.arange(int(counts.sum()), dtype=torch.int32)
    positions = row - query_start[request.long()] + torch.tensor(starts, dtype=torch.int32)[request.long()]
    longest = max(s + n for s, n in zip(starts, lengths, strict=True))
    num_blocks = -(-longest // 128)
    order = torch.randperm(len(lengths) * num_blocks, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    none = torch.empty(0, dtype=torch.int32)
    return ForwardBatch(
        token_ids=row, positions=positions, row_to_request=request, query_start=query_start,
        block_table=order.view(len(lengths), num_blocks), state_slot=torch.arange(len(lengths), dtype=torch.int32).flip(0),
        ngram_ids=none, window=RingWrites(none, none), compression={}, logit_rows=none,
        window_start=torch.zeros(len(lengths), dtype=torch.int32), max_context=longest,
    )  # fmt: skip


def rotary(positions: int, half: int) -> RotaryRows:
    angles = torch.arange(positions).unsqueeze(1) * 100.0 ** (-torch.arange(half) / half)
    return RotaryRows(angles.cos(), angles.sin())


def assert_close(got, wanted, tolerance: float = 2e-6) -> None:
    for a, b in zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]:
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm() + 1e-12


def test_every_op_has_a_native_entry(kernels):
    assert set(NATIVE_OPS) <= set(REFERENCE)


@pytest.mark.parametrize("fmt", ["fp8_tiles", "fp4_rows", "bf16", "f32"])
@pytest.mark.parametrize("shape", [(64, 32), (32, 1056), (160, 512)])
def test_decoded_panels_hold_the_values(kernels, fmt, shape):
    matrix = stored(fmt, *shape)
    panels = kernels.prepare_linear([matrix], "decoded").handle._panels[0]
    got = panels.transpose(1, 2).reshape(-1, shape[1])[: shape[0]]
    assert torch.equal(got, decode(matrix))


def test_all_bytes_of_fp8_and_all_scales_decode(kernels):
    data = torch.arange(256, dtype=torch.uint8).repeat(32, 4)
    data[(data & 0x7F) == 0x7F] = 0  # NaN
    scale = torch.arange(0, 32, dtype=torch.uint8)[None] * 8
    matrix = StoredMatrix("all", "fp8_tiles", data, scale[:, :32], 32, 1024)
    panels = kernels.prepare_linear([matrix], "decoded").handle._panels[0]
    assert torch.equal(panels.transpose(1, 2).reshape(32, 1024), decode(matrix))


@pytest.mark.parametrize("fmt", ["fp8_tiles", "fp4_rows", "bf16", "f32"])
@pytest.mark.parametrize("shape", [(64, 32), (24, 512), (40, 1056), (416, 640)])
def test_linear(kernels, fmt, shape):
    if fmt == "fp8_tiles" and shape[0] % 32:
        pytest.skip("FP8 tiles have 32 rows")
    matrix = stored(fmt, *shape)
    x = rand(65, shape[1], seed=1)
    wanted = x.double() @ decode(matrix).double().T
    decoded, packed = (kernels.prepare_linear([matrix], how) for how in ("decoded", "packed"))
    whole = kernels.linear(x, decoded)
    assert_close(whole, wanted)
    for rows in ROWS:
        for offset in (0, 65 - rows):
            part = x[offset : offset + rows].contiguous()
            assert torch.equal(kernels.linear(part, decoded), whole[offset : offset + rows])
            assert torch.equal(kernels.linear(part, packed), whole[offset : offset + rows])


def test_linear_of_no_rows(kernels):
    weight = kernels.prepare_linear([stored("bf16", 32, 64)], "decoded")
    assert kernels.linear(torch.empty(0, 64), weight).shape == (0, 32)


def test_packed_reads_unaligned_maps(kernels):
    matrix = stored("fp8_tiles", 64, 64)
    raw = torch.empty(matrix.data.numel() + 3, dtype=torch.uint8)
    moved = raw[3:].view(64, 64).copy_(matrix.data)
    shifted = StoredMatrix("moved", "fp8_tiles", moved, matrix.scale, 64, 64)
    x = rand(3, 64)
    results = [kernels.linear(x, kernels.prepare_linear([m], "packed")) for m in (matrix, shifted)]
    assert torch.equal(*results)


def test_stacked_matrices(kernels):
    parts = [stored("fp8_tiles", 64, 96, seed=1), stored("fp8_tiles", 32, 96, seed=2)]
    x = rand(5, 96)
    both = kernels.linear(x, kernels.prepare_linear(parts, "decoded"))
    one_by_one = [kernels.linear(x, kernels.prepare_linear([m], "decoded")) for m in parts]
    assert torch.equal(both, torch.cat(one_by_one, 1))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_linear(kernels, groups):
    matrix = stored("fp8_tiles", groups * 32, 128)
    x = rand(33, groups, 128)
    weight = kernels.prepare_linear([matrix], "decoded")
    whole = kernels.grouped_linear(x, weight)
    values = decode(matrix).double().view(groups, 32, 128)
    assert_close(whole, torch.einsum("tgk,grk->tgr", x.double(), values).flatten(1))
    for rows in (1, 7):
        assert torch.equal(kernels.grouped_linear(x[:rows].contiguous(), weight), whole[:rows])


def rounding_samples(width: int) -> torch.Tensor:
    rows = [rand(4000, width, seed=i) * 10.0**e for i, e in enumerate(range(-12, 12))]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, 0.0, -0.0, 17.0, 19.0, 448.0])
    scales = 2.0 ** torch.arange(-30, 30).float().unsqueeze(1)
    rows += [ties.repeat(width // 16)[None] * scales, torch.zeros(1, width), torch.full((1, width), 1e-45)]
    return torch.cat(rows)


def test_round_fp8_is_the_reference(kernels):
    x = rounding_samples(64)
    assert torch.equal(kernels.round_fp8(x), REFERENCE["round_fp8"](x))


@pytest.mark.parametrize(("group", "scale"), [(16, "e4m3"), (32, "ue8m0")])
def test_round_fp4_is_the_reference(kernels, group, scale):
    x = rounding_samples(64)
    assert torch.equal(kernels.round_fp4(x, group, scale), REFERENCE["round_fp4"](x, group, scale))


def check_rows(function, *inputs: torch.Tensor) -> None:
    """Rows computed alone, or among others, have the same bits."""
    whole = function(*inputs)
    whole = whole if isinstance(whole, tuple) else (whole,)
    total = len(inputs[0])
    for rows in ROWS:
        for offset in (0, total - rows):
            part = function(*(i[offset : offset + rows].contiguous() for i in inputs))
            part = part if isinstance(part, tuple) else (part,)
            assert all(torch.equal(p, w[offset : offset + rows]) for p, w in zip(part, whole, strict=True))


def test_norm_rotate_window(kernels):
    weight, table = rand(128, seed=9) + 1, rotary(70, 8)
    x, positions = rand(65, 128), torch.arange(65, dtype=torch.int32).flip(0).contiguous()
    for op, inputs in (
        ("rms_norm", lambda k, a, p: k(a, weight, 1e-20)),
        ("rotate", lambda k, a, p: k(a, p, table)),
        ("window_rows", lambda k, a, p: k(a, weight, 1e-20, p, table, False)),
    ):

        def ours(a, p, op=op, inputs=inputs):
            return inputs(getattr(kernels, op), a, p)

        assert_close(ours(x, positions), inputs(REFERENCE[op], x, positions))
        check_rows(ours, x, positions)
    heads = rand(65, 4, 64)
    assert_close(kernels.rotate(heads, positions, table), REFERENCE["rotate"](heads, positions, table))
    rounded = kernels.window_rows(x, weight, 1e-20, positions, table, True)
    plain = kernels.window_rows(x, weight, 1e-20, positions, table, False)
    assert torch.equal(rounded, kernels.round_fp8(plain))


def test_write_rows(kernels):
    storage, values = torch.zeros(40, 16), rand(9, 16)
    dst, rows = torch.tensor([3, 39, 0], dtype=torch.int32), torch.tensor([8, 1, 2], dtype=torch.int32)
    kernels.write_rows(storage, dst, values, rows)
    assert torch.equal(storage[[3, 39, 0]], values[[8, 1, 2]])
    assert storage.count_nonzero() == 3 * 16


def test_hyper_connections(kernels):
    width, params = 96, HyperParams(4, 20, 1e-6, 1e-20)
    fn = StoredMatrix("fn", "f32", rand(24, 4 * width, std=0.05), None, 24, 4 * width)
    base, scale = rand(24, seed=3), rand(3, seed=4)
    h, y = rand(65, 4, width, seed=5), rand(65, width, seed=6)
    native_fn, torch_fn = kernels.prepare_linear([fn], "decoded"), LinearWeight(24, 4 * width, fn.data)
    pre, post, comb = kernels.hc_map(h, native_fn, base, scale, params)
    assert_close((pre, post, comb), REFERENCE["hc_map"](h, torch_fn, base, scale, params), 5e-6)
    assert (comb.sum(1) - 1).abs().max() < 1e-5  # columns were normalised last
    check_rows(lambda a: kernels.hc_map(a, native_fn, base, scale, params), h)
    weight = rand(width, seed=7)
    assert_close(kernels.hc_collapse(h, pre, weight, 1e-20), REFERENCE["hc_collapse"](h, pre, weight, 1e-20))
    check_rows(lambda a, p: kernels.hc_collapse(a, p, weight, 1e-20), h, pre)
    assert_close(kernels.hc_expand(y, h, post, comb), REFERENCE["hc_expand"](y, h, post, comb))
    check_rows(kernels.hc_expand, y, h, post, comb)


def test_pool_groups(kernels):
    values, gates = rand(12, 64), rand(12, 64, seed=1)
    partial = rand(32, 2, 64, seed=2)
    source = torch.tensor([[-1 - 7, 0], [1, 2], [-1 - 31, 5]], dtype=torch.int32)
    kept = RingWrites(torch.tensor([3, 11], dtype=torch.int32), torch.tensor([7, 0], dtype=torch.int32))
    plan = CompressionPlan(source, source[:, 0].contiguous(), source[:, 0].contiguous(), kept)
    ours, theirs = partial.clone(), partial.clone()
    assert_close(kernels.pool_groups(values, gates, ours, plan), REFERENCE["pool_groups"](values, gates, theirs, plan))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("heads", [4, 5])
@pytest.mark.parametrize("width", [64, 96])
def test_sparse_attention(kernels, heads, width):
    batch = make_batch([5, 1, 40, 19], [3, 100, 0, 77])
    window, rows = 16, 65
    q, kv = rand(rows, heads, width), rand(rows, width, seed=1)
    ring, entries = rand(4, 24, width, seed=2), rand(256, width, seed=3)
    selected = torch.randint(0, 256, (rows, 7), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    selected[::3, 4:] = -1
    selected[1] = -1
    sink, table = rand(heads, seed=5), rotary(128, 8)
    arguments = (q, kv, ring, entries, selected, sink, batch, window, table)
    got = kernels.sparse_attention(*arguments)
    assert_close(got, REFERENCE["sparse_attention"](*arguments))
    without = (q, kv, ring, None, None, sink, batch, window, table)
    assert_close(kernels.sparse_attention(*without), REFERENCE["sparse_attention"](*without))


def test_sparse_attention_sees_nothing_before_the_window_start(kernels):
    batch = make_batch([5, 1, 40, 19], [3, 100, 0, 77])
    batch = dataclasses.replace(batch, window_start=torch.tensor([2, 100, 30, 60], dtype=torch.int32))
    ring = rand(4, 24, 64, seed=2)
    ring[2, [84 % 24, 99 % 24]] = torch.nan  # positions before the start of request 1, in slot 2
    arguments = (rand(65, 4, 64), rand(65, 64), ring, None, None, rand(4), batch, 16, rotary(128, 8))
    got = kernels.sparse_attention(*arguments)
    assert got[5].isfinite().all()
    assert_close(got[6:], REFERENCE["sparse_attention"](*arguments)[6:])


def test_sparse_attention_reads_no_absent_key(kernels):
    batch = make_batch([3], [0])
    ring, entries = torch.full((1, 24, 64), torch.nan), torch.full((9, 64), torch.nan)
    selected = torch.full((3, 4), -1, dtype=torch.int32)
    arguments = (rand(3, 4, 64), rand(3, 64), ring, entries, selected, rand(4), batch, 16, rotary(8, 8))
    assert kernels.sparse_attention(*arguments).isfinite().all()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("heads", [16, 24, 32])
def test_select_entries(kernels, ties, ratio, heads):
    batch = make_batch([30, 1, 60], [0, 390, 200])
    rows, width, per_block = 91, 32, 128 // ratio
    q, weights = rand(rows, heads, width), rand(rows, heads, seed=1)
    keys = rand(batch.block_table.numel() * per_block, width, seed=2)
    if ties:  # small whole numbers: sums are exact and many scores are equal
        q, weights, keys = ((t * 2).round().clamp(-1, 1) for t in (q, weights, keys))
    rule = SelectionRule(ratio, per_block, topk=16, block_size=8, topk_blocks=6, publishes=True)
    got = kernels.select_entries(q, weights, keys, batch, rule, None)
    wanted = REFERENCE["select_entries"](q, weights, keys, batch, rule, None)
    assert torch.equal(got.blocks, wanted.blocks)
    assert torch.equal(got.entries, wanted.entries)
    inside = SelectionRule(ratio, per_block, topk=16, block_size=8, topk_blocks=6, publishes=False)
    assert torch.equal(
        kernels.select_entries(q, weights, keys, batch, inside, got.blocks).entries,
        REFERENCE["select_entries"](q, weights, keys, batch, inside, got.blocks).entries,
    )


def test_route(kernels):
    gate = stored("bf16", 24, 64)
    x, bias = rand(65, 64), rand(24, seed=2)
    bias[5] = bias[6] = 30.0
    native_gate = kernels.prepare_linear([gate], "decoded")
    ids, weights = kernels.route(x, native_gate, bias, 3, 1.5)
    wanted_ids, wanted = REFERENCE["route"](x, LinearWeight(24, 64, decode(gate)), bias, 3, 1.5)
    assert torch.equal(ids, wanted_ids)
    assert_close(weights, wanted)
    check_rows(lambda a: kernels.route(a, native_gate, bias, 3, 1.5), x)


def test_route_ties_go_to_the_lowest_id(kernels):
    gate = StoredMatrix("gate", "f32", torch.zeros(8, 16), None, 8, 16)
    ids, _ = kernels.route(rand(4, 16), kernels.prepare_linear([gate], "decoded"), torch.zeros(8), 3, 1.0)
    assert ids.tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("rounded", [False, True])
def test_experts(kernels, rounded):
    hidden, inner, count, top_k = 64, 96, 7, 3

    def expert(fmt: str, seed: int) -> StoredExpert:
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        return StoredExpert(*(stored(fmt, *s, seed=seed + i) for i, s in enumerate(shapes)))

    routed = [expert("fp4_rows", 10 * e) for e in range(count)]
    shared = expert("fp8_tiles", 1000)
    x, weights = rand(65, hidden, std=3.0), rand(65, top_k, seed=1).abs()
    ids = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(i))[:top_k] for i in range(65)])
    ids = ids.to(torch.int32)
    ids[ids == 4] = 5  # an expert that receives nothing, and one that a row picks twice
    ours = [kernels.prepare_experts(routed, shared, how) for how in ("decoded", "packed")]
    theirs = REFERENCE["prepare_experts"](routed, shared, "decoded")
    got = kernels.experts(x, ids, weights, ours[0], 1.5, rounded)
    if rounded:  # a value on a rounding tie may fall either way; few do
        wanted = REFERENCE["experts"](x, ids, weights, theirs, 1.5, rounded)
        assert ((got - wanted).norm(dim=1) < 1e-5 * wanted.norm(dim=1)).float().mean() > 0.9
    else:
        assert_close(got, REFERENCE["experts"](x, ids, weights, theirs, 1.5, rounded))
    assert torch.equal(kernels.experts(x, ids, weights, ours[1], 1.5, rounded), got)
    check_rows(lambda a, i, w: kernels.experts(a, i, w, ours[0], 1.5, rounded), x, ids, weights)


def test_engram(kernels):
    hashing = EngramHash(
        token_map=torch.randint(0, 99092, (500,), generator=torch.Generator().manual_seed(1)),
        pad=2,
        multipliers=torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391]),
        primes=torch.tensor([16000057, 16000079, 16000189, 16000207, 16000339, 16000381]),
        offsets=torch.tensor([0, 10, 20, 30, 40, 50]),
    )
    ids = torch.randint(-1, 500, (65, 4), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    assert torch.equal(kernels.engram_rows(ids, hashing), REFERENCE["engram_rows"](ids, hashing))
    h, key_value, weight = rand(65, 4, 64), rand(65, 5, 64, seed=1), rand(4, 64, seed=2)
    h[3] = 0.0
    assert_close(kernels.engram_gate(h, key_value, weight, 1e-20), REFERENCE["engram_gate"](h, key_value, weight, 1e-20))
    check_rows(lambda a, b: kernels.engram_gate(a, b, weight, 1e-20), h, key_value)


@needs_native
def test_threads_and_instruction_sets_give_the_same_bits():
    """Products large enough to be spread over threads, attention, selection and experts."""
    matrix = stored("bf16", 1024, 512)
    batch = make_batch([200, 1], [0, 390])
    rows = 201
    x, q, kv = rand(rows, 512), rand(rows, 4, 64), rand(rows, 64, seed=1)
    ring, sink, table = rand(2, 40, 64), rand(4), rotary(512, 8)
    index_q, weights, keys = rand(rows, 16, 32), rand(rows, 16), rand(batch.block_table.numel() * 128, 32)
    rule = SelectionRule(1, 128, 16, 8, 6, True)
    h, params = rand(rows, 4, 512, seed=3), HyperParams(4, 20, 1e-6, 1e-20)
    fn = StoredMatrix("fn", "f32", rand(24, 2048, std=0.05), None, 24, 2048)
    results = []
    for variant in VARIANTS:
        for threads in (1, 2, 3):
            library = native.load(variant)
            library.abyssal_set_num_threads(threads)
            k = Kernels(library)
            selection = k.select_entries(index_q, weights, keys, batch, rule, None)
            results.append(
                (
                    k.linear(x, k.prepare_linear([matrix], "decoded")),
                    k.linear(x[:1], k.prepare_linear([matrix], "packed")),
                    k.sparse_attention(q, kv, ring, None, None, sink, batch, 32, table),
                    selection.entries,
                    selection.blocks,
                    *k.hc_map(h, k.prepare_linear([fn], "decoded"), rand(24), rand(3), params),
                )
            )
            library.abyssal_set_num_threads(1)
    assert len(results) == 3 * len(VARIANTS)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
