"""Time of each CPU op at the shapes of one layer, and of matrix products against what the processor can do.

    python benchmarks/cpu_ops.py [--threads N] [--preset deep] [--rows 1,32,256] [--released packed|decoded]

Matrix products are counted against the best rate of a product that stays in the caches, which is measured first; the
sum over one layer's calls is what a token pays for a layer, Python's share included. `--released` adds the ops of one layer
at the width of the released model on random weights, with a sixteenth of its experts (1 GB packed, 5 GB decoded). Ends
with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from abyssal.backends.cpu.table import cpu_table
from abyssal.cache.spec import CacheSpec
from abyssal.cache.storage import CacheStorage
from abyssal.config.engine import EngineConfig, Numerics
from abyssal.config.model import ModelConfig
from abyssal.config.topology import Topology
from abyssal.core.batch import ForwardBatch, RingWrites, ScheduledRows, SchedulerOutput, SlotAssignment
from abyssal.core.sampling_params import SamplingParams
from abyssal.loading.open import open_weights
from abyssal.loading.random_checkpoint import write_random_checkpoint
from abyssal.model.common import ModelContext
from abyssal.model.flash import FlashModel
from abyssal.ops.hyper_connection import HyperParams
from abyssal.ops.indexer import SelectionRule
from abyssal.ops.linear import HeldAs, LinearWeight
from abyssal.ops.moe import StoredExpert
from abyssal.ops.norm_rope import RotaryRows
from abyssal.ops.registry import OpTable
from abyssal.quant.formats import MatrixFormat, StoredMatrix
from abyssal.runner.input_batch import BatchGeometry, InputBatch
from abyssal.text.vocabulary import token_map_of


def median_seconds(call: Callable[[], object], budget: float = 0.3) -> float:
    """Median time of a call, repeated within a time budget."""
    call()
    times: list[float] = []
    while sum(times) < budget or len(times) < 5:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


class Timed:
    """An op table whose calls are counted and timed by op."""

    def __init__(self, table: OpTable) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        wrapped = {name: self._wrap(name, fn) for name, fn in vars(table).items()}
        self.table = OpTable(**wrapped)

    def _wrap(self, name: str, fn: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            begin = time.perf_counter()
            result = fn(*args)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            self.calls[name] = self.calls.get(name, 0) + 1
            return result

        return call


def peak_gflops(table: OpTable) -> float:
    """The best rate of a product that stays in the caches: what the multiply-add units give."""
    weight = table.prepare_linear([StoredMatrix("peak", "f32", torch.randn(64, 256), None, 64, 256)], "decoded")
    x = torch.randn(512, 256)
    return 2 * 512 * 256 * 64 / median_seconds(lambda: table.linear(x, weight)) / 1e9


def products(table: OpTable, peak: float) -> list[dict[str, float]]:
    """Products at the released model's width."""
    rows_of_result = []
    inputs, outputs = 5120, 2304
    weight: LinearWeight = table.prepare_linear(
        [StoredMatrix("w1", "f32", torch.randn(outputs, inputs), None, outputs, inputs)], "decoded"
    )
    for rows in (1, 8, 64, 256):
        x = torch.randn(rows, inputs)
        seconds = median_seconds(lambda x=x: table.linear(x, weight))
        gflops = 2 * rows * inputs * outputs / seconds / 1e9
        result = {"rows": rows, "ms": seconds * 1e3, "gflops": gflops, "share_of_peak": gflops / peak}
        result["weight_gb_s"] = 4 * inputs * outputs / seconds / 1e9
        rows_of_result.append(result)
    return rows_of_result


def layer_costs(folder: Path, table: OpTable, rows: int, numerics: str) -> tuple[dict[str, float], float]:
    """Microseconds a layer by op, and of the whole step a layer, for one request of `rows` rows after 256 others."""
    model_config = ModelConfig.load(folder)
    text, topology = model_config.text, Topology.of(model_config.text)
    timed = Timed(table)
    weights = open_weights(folder, model_config, EngineConfig(engram="memory"))
    context = ModelContext(text, Numerics.parse(numerics), timed.table, "decoded", weights)
    model = FlashModel(context, topology, torch.from_numpy(token_map_of(folder, text)))
    spec = CacheSpec.of(text, topology)
    storage = CacheStorage(spec, 8, 1)
    inputs = InputBatch(BatchGeometry.of(text, spec, topology, 1, 1024))
    ids = tuple(torch.randint(11, 400, (512,)).tolist())
    inputs.assign(SlotAssignment("a", 0, ids, SamplingParams(), 0))
    none: frozenset[str] = frozenset()
    first = inputs.gather(SchedulerOutput((), (ScheduledRows("a", 0, 0, 256, 0, (0, 1, 2, 3), False),)), none)
    batch = inputs.gather(SchedulerOutput((), (ScheduledRows("a", 0, 256, rows, 4, (), True),)), none)
    with torch.inference_mode():
        model.forward(first, storage)
        timed.seconds.clear()
        timed.calls.clear()
        repeats = max(3, 60 // rows)
        whole = statistics.median(_timed(lambda: model.forward(batch, storage)) for _ in range(repeats))
    scale = 1e6 / repeats / len(topology.layers)
    return {name: s * scale for name, s in timed.seconds.items()}, whole * 1e6 / len(topology.layers)


RELEASED_EXPERTS = 24


def random_matrix(fmt: MatrixFormat, outputs: int, inputs: int) -> StoredMatrix:
    """A matrix of random bytes, none of which is no number."""
    if fmt == "f32":
        return StoredMatrix("w", fmt, torch.randn(outputs, inputs), None, outputs, inputs)
    if fmt == "bf16":
        return StoredMatrix("w", fmt, torch.randn(outputs, inputs).bfloat16(), None, outputs, inputs)
    scale_rows, width = (outputs // 32, inputs) if fmt == "fp8_tiles" else (outputs, inputs // 2)
    data = torch.randint(0, 127, (outputs, width), dtype=torch.uint8)
    return StoredMatrix("w", fmt, data, torch.full((scale_rows, inputs // 32), 118, dtype=torch.uint8), outputs, inputs)


def random_expert(fmt: MatrixFormat) -> StoredExpert:
    """An expert of the released width."""
    return StoredExpert(random_matrix(fmt, 2304, 5120), random_matrix(fmt, 2304, 5120), random_matrix(fmt, 5120, 2304))


class ReleasedLayer:
    """Random weights of one layer at the released width, and the calls that its rows make after 8,192 tokens of context."""

    CONTEXT = 8192

    def __init__(self, table: OpTable, held_as: HeldAs) -> None:
        self.table = table
        shapes: dict[str, tuple[MatrixFormat, int, int]] = {
            "wq_a, wkv": ("fp8_tiles", 1792, 5120), "wq_b": ("fp8_tiles", 32768, 1280), "wo_a": ("fp8_tiles", 8192, 4096),
            "wo_b": ("fp8_tiles", 5120, 8192), "fn": ("f32", 24, 20480), "gate": ("bf16", 384, 5120),
        }  # fmt: skip
        self.weights = {name: table.prepare_linear([random_matrix(*shape)], held_as) for name, shape in shapes.items()}
        routed = [random_expert("fp4_rows") for _ in range(RELEASED_EXPERTS)]
        self.experts = table.prepare_experts(routed, random_expert("fp8_tiles"), held_as)
        angles = torch.rand(self.CONTEXT + 512, 32)
        self.rotary = RotaryRows(angles.cos(), angles.sin())
        self.entries, self.index_keys = torch.randn(16384, 512), torch.randn(16384, 128)
        self.ring = torch.randn(1, 136, 512)

    def batch(self, rows: int) -> ForwardBatch:
        """Rows of one request, as far as ops look at them."""
        row = torch.arange(rows, dtype=torch.int32)
        zero, none = torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
        return ForwardBatch(
            token_ids=row, positions=row + self.CONTEXT, row_to_request=torch.zeros_like(row),
            query_start=torch.tensor([0, rows], dtype=torch.int32), state_slot=zero, ngram_ids=none,
            block_table=torch.arange(128, dtype=torch.int32).view(1, -1), window=RingWrites(none, none), compression={},
            logit_rows=none, window_start=zero, max_context=self.CONTEXT + rows,
        )  # fmt: skip

    def calls(self, rows: int) -> dict[str, Callable[[], object]]:
        """One call of each op."""
        ops, w, batch = self.table, self.weights, self.batch(rows)
        h, x, q, kv = (torch.randn(rows, *shape) for shape in ((4, 5120), (5120,), (64, 512), (512,)))
        params, norm = HyperParams(4, 20, 1e-6, 1e-20), torch.ones(5120)
        pre, post, comb = ops.hc_map(h, w["fn"], torch.zeros(24), torch.ones(3), params)
        index_q, index_weights = torch.randn(rows, 32, 128), torch.randn(rows, 32)
        rule = SelectionRule(1, 128, 512, 8, 2048, False)
        selected = ops.select_entries(index_q, index_weights, self.index_keys, batch, rule, None).entries
        ids = torch.rand(rows, RELEASED_EXPERTS).argsort(1)[:, :6].to(torch.int32).contiguous()
        picked = torch.full((rows, 6), 0.25)
        bias, sink, qr = torch.zeros(384), torch.zeros(64), torch.randn(rows, 1280)
        grouped, z = torch.randn(rows, 8, 4096), torch.randn(rows, 8192)
        positions, rotary = batch.positions, self.rotary
        return {
            "hc_map": lambda: ops.hc_map(h, w["fn"], torch.zeros(24), torch.ones(3), params),
            "hc_collapse": lambda: ops.hc_collapse(h, pre, norm, 1e-20),
            "hc_expand": lambda: ops.hc_expand(x, h, post, comb),
            "round_fp8": lambda: ops.round_fp8(x),
            "linear wq_a, wkv": lambda: ops.linear(x, w["wq_a, wkv"]),
            "linear wq_b": lambda: ops.linear(qr, w["wq_b"]),
            "rotate": lambda: ops.rotate(q, positions, rotary),
            "window_rows": lambda: ops.window_rows(kv, norm[:512], 1e-20, positions, rotary, True),
            "select_entries of 8192": lambda: ops.select_entries(index_q, index_weights, self.index_keys, batch, rule, None),
            "sparse_attention of 640": lambda: ops.sparse_attention(
                q, kv, self.ring, self.entries, selected, sink, batch, 128, rotary
            ),
            "grouped_linear wo_a": lambda: ops.grouped_linear(grouped, w["wo_a"]),
            "linear wo_b": lambda: ops.linear(z, w["wo_b"]),
            "route": lambda: ops.route(x, w["gate"], bias, 6, 1.5),
            "experts": lambda: ops.experts(x, ids, picked, self.experts, 10.0, True),
        }


def released_costs(table: OpTable, held_as: HeldAs, rows: list[int]) -> dict[int, dict[str, float]]:
    """Milliseconds of each op at the released width, by rows."""
    layer = ReleasedLayer(table, held_as)
    with torch.inference_mode():
        return {r: {name: median_seconds(c) * 1e3 for name, c in layer.calls(r).items()} for r in rows}


def report(console: Console, title: str, costs: dict[int, dict[str, float]], digits: int) -> None:
    """One line an op, one column a number of rows."""
    rows = list(costs)
    shown = Table(title=title)
    for heading in ("op", *(f"{r} rows" for r in rows)):
        shown.add_column(heading, justify="right" if heading != "op" else "left")
    for op in dict.fromkeys(op for by_op in costs.values() for op in by_op):
        shown.add_row(op, *(f"{costs[r].get(op, 0.0):.{digits}f}" for r in rows))
    console.print(shown)


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--preset", default="deep")
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--numerics", default="released")
    parser.add_argument("--released", choices=("packed", "decoded"))
    args = parser.parse_args()
    table = cpu_table("native", args.threads)
    peak = peak_gflops(table)
    gemm = products(table, peak)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_checkpoint(folder, args.preset, seed=7)
        rows = [int(r) for r in args.rows.split(",")]
        costs = {r: layer_costs(folder, table, r, args.numerics) for r in rows}
    console = Console()
    title = f"microseconds a layer of {args.preset}, {args.threads} threads"
    by_op = {r: dict(sorted(ops.items())) | {"whole step": whole} for r, (ops, whole) in costs.items()}
    report(console, title, by_op, 1)
    released = released_costs(table, args.released, rows) if args.released else {}
    if released:
        report(console, f"milliseconds at the released width, {args.released}, {args.threads} threads", released, 3)
    for line in gemm:
        console.print(
            f"{line['rows']:4.0f} rows x [2304, 5120]: {line['ms']:8.2f} ms {line['gflops']:7.1f} GFLOP/s "
            f"({100 * line['share_of_peak']:.0f}% of {peak:.0f}), weights at {line['weight_gb_s']:.1f} GB/s"
        )
    layer_us = {r: {"ops": ops, "step": whole} for r, (ops, whole) in costs.items()}
    result = {"threads": args.threads, "preset": args.preset, "peak_gflops": peak, "gemm": gemm, "layer_us": layer_us}
    print(json.dumps(result | ({"released_ms": released} if released else {})))


if __name__ == "__main__":
    main()
