"""What the card itself can do: the figures that kernels are measured against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

COPY_BYTES = 4 << 30
GEMM_SIZE = 8192
HOST_BYTES = 1 << 30
LAUNCHES = 200


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one card.

    Attributes:
        copy: bytes a second read plus written by a copy within the card's memory.
        bf16, fp8: operations a second (two for a multiply-add) of a large square product of random numbers.
        host_to_card: bytes a second from pinned memory.
        launch_seconds: host time to issue one small kernel.
        graph_node_seconds: time of one small kernel in a replayed graph.
    """

    device: str
    processors: int
    copy: float
    bf16: float
    fp8: float
    host_to_card: float
    launch_seconds: float
    graph_node_seconds: float


def measure_ceilings() -> Ceilings:
    """Measure the current card; takes a few seconds and about 10 GB of its memory."""
    properties = torch.cuda.get_device_properties()
    return Ceilings(
        properties.name,
        properties.multi_processor_count,
        _copy_rate(),
        _bf16_rate(),
        _fp8_rate(),
        _host_rate(),
        _launch_seconds(),
        _graph_node_seconds(),
    )


def median_seconds(run: Callable[[], object], repeats: int = 10, warm_up: int = 3) -> float:
    """Median time of `run` on the card, by events around each of its runs."""
    for _ in range(warm_up):
        run()
    times: list[float] = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) / 1e3)
    return statistics.median(times)


def graph_of(runs: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph that makes all runs in order; each is run once before."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


def _copy_rate() -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_seconds(lambda: target.copy_(source))


def _bf16_rate() -> float:
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * GEMM_SIZE**3 / median_seconds(lambda: torch.mm(a, b, out=out), 20)


def _fp8_rate() -> float:
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return 2 * GEMM_SIZE**3 / median_seconds(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16), 20)


def _host_rate() -> float:
    source = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(HOST_BYTES, dtype=torch.uint8, device="cuda")
    return HOST_BYTES / median_seconds(lambda: target.copy_(source, non_blocking=True), 5)


def _launch_seconds() -> float:
    x = torch.zeros(1, device="cuda")

    def issue() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1.0)
        return (time.perf_counter() - start) / LAUNCHES

    return float(statistics.median(issue() for _ in range(5)))


def _graph_node_seconds() -> float:
    x = torch.zeros(1, device="cuda")
    graph = graph_of([lambda: x.add_(1.0)] * LAUNCHES)
    return median_seconds(graph.replay) / LAUNCHES
