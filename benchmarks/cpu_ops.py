"""Time of each CPU op at the shapes of one layer, and of matrix products against what the processor can do.

    python benchmarks/cpu_ops.py [--threads N] [--preset deep] [--rows 1,32,256]

Matrix products are counted against the best rate of a product that stays in the caches, which is measured first; the
sum over one layer's calls is what a token pays for a layer, Python's share included. Ends with one line of JSON.
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
from abyssal.core.batch import ScheduledRows, SchedulerOutput, SlotAssignment
from abyssal.core.sampling_params import SamplingParams
from abyssal.loading.open import open_weights
from abyssal.loading.random_checkpoint import write_random_checkpoint
from abyssal.model.common import ModelContext
from abyssal.model.flash import FlashModel
from abyssal.ops.linear import LinearWeight
from abyssal.ops.registry import OpTable
from abyssal.quant.formats import StoredMatrix
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
    args = parser.parse_args()
    table = cpu_table("native", args.threads)
    peak = peak_gflops(table)
    gemm = products(table, peak)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_checkpoint(folder, args.preset, seed=7)
        rows = [int(r) for r in args.rows.split(",")]
        costs = {r: layer_costs(folder, table, r, args.numerics) for r in rows}
    report = Table(title=f"microseconds a layer of {args.preset}, {args.threads} threads")
    for title in ("op", *(f"{r} rows" for r in rows)):
        report.add_column(title, justify="right" if title != "op" else "left")
    for op in sorted({op for by_op, _ in costs.values() for op in by_op}):
        report.add_row(op, *(f"{costs[r][0].get(op, 0.0):.1f}" for r in rows))
    report.add_row("whole step", *(f"{costs[r][1]:.1f}" for r in rows))
    console = Console()
    console.print(report)
    for line in gemm:
        console.print(
            f"{line['rows']:4.0f} rows x [2304, 5120]: {line['ms']:8.2f} ms {line['gflops']:7.1f} GFLOP/s "
            f"({100 * line['share_of_peak']:.0f}% of {peak:.0f}), weights at {line['weight_gb_s']:.1f} GB/s"
        )
    layer_us = {r: {"ops": by_op, "step": whole} for r, (by_op, whole) in costs.items()}
    print(
        json.dumps({"threads": args.threads, "preset": args.preset, "peak_gflops": peak, "gemm": gemm, "layer_us": layer_us})
    )


if __name__ == "__main__":
    main()
