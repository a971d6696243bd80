"""Checks and times the CUDA backend's ops at the released model's sizes, as shares of what the card can do.

    python benchmarks/h200.py [--only linear experts] [--out results.json] [--commit id]

Weights are random bytes made on the card. Times are medians of replayed CUDA graphs; matrices that would stay in the L2
cache are rotated. Prints tables, writes JSON, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from abyssal.backends.cpu.linear import dense
from abyssal.backends.cpu.linear import prepare_linear as prepare_reference
from abyssal.backends.cuda import build, moe
from abyssal.backends.cuda.ceilings import Ceilings, graph_of, measure_ceilings, median_seconds
from abyssal.backends.cuda.gemm import SwiGlu, multiply
from abyssal.backends.cuda.linear import grouped_linear, linear
from abyssal.backends.cuda.moe import PackedExperts
from abyssal.backends.cuda.packing import PackedFormat, PackedMatrix, empty_packed
from abyssal.backends.cuda.quantize import round_fp8
from abyssal.ops.linear import LinearWeight
from abyssal.ops.moe import ExpertWeights, StoredExpert
from abyssal.quant.formats import StoredMatrix

HIDDEN, WIDTH, EXPERTS, TOP_K, LIMIT = 5120, 2304, 384, 6, 10.0
LINEARS = {"wq_a+wkv": (1792, 5120), "wq_b": (32768, 1280), "wo_b": (5120, 8192), "engram.wkv": (25600, 6144)}
WO_A = (8, 1024, 4096)
L2_BYTES = 60 << 20
Rows = list[dict[str, object]]


def random_packed(format: PackedFormat, groups: int, rows: int, columns: int, paired: bool = False) -> PackedMatrix:
    """Random codes under scales around 2^-6."""
    packed = empty_packed(format, groups, rows, columns, paired)
    data = {"fp4": 4096, "fp8": 8192, "bf16": 16384}[format]
    for chunks in packed.chunks:
        if format == "bf16":
            chunks.copy_(
                (torch.randn(chunks.numel() // 2, device="cuda") * 0.02).bfloat16().view(torch.uint8).view_as(chunks)
            )
        else:
            chunks.random_(0, 256)
            low = {"fp4": 119 + 62, "fp8": 117 + 56}[format]
            chunks[..., data:].random_(low, low + 5)
    return packed


def seconds_of(runs: list[Callable[[], object]]) -> float:
    """Time of one run, from replays of a graph of all of them."""
    graph = graph_of(runs)
    return median_seconds(graph.replay, 12) / len(runs)


# ---- checks


def random_stored(format: str, rows: int, columns: int) -> StoredMatrix:
    if format == "fp4_rows":
        scale = torch.randint(119, 124, (rows, columns // 32), dtype=torch.uint8)
        return StoredMatrix(
            "w", format, torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8), scale, rows, columns
        )
    data = (
        torch.randint(0, 120, (rows, columns), dtype=torch.uint8)
        | torch.randint(0, 2, (rows, columns), dtype=torch.uint8) << 7
    )
    scale = torch.randint(114, 119, (rows // 32, columns // 32), dtype=torch.uint8)
    return StoredMatrix("w", "fp8_tiles", data, scale, rows, columns)


def values(matrix: StoredMatrix) -> torch.Tensor:
    return dense(prepare_reference([matrix], "decoded")).cuda()


def check_experts() -> dict[str, object]:
    """Experts at full width, few of them, against float32 products on the card; rows alone against rows in a batch."""
    num = 8

    def expert(format: str) -> StoredExpert:
        return StoredExpert(*(random_stored(format, n, k) for n, k in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))))

    stored, shared = [expert("fp4_rows") for _ in range(num)], expert("fp8_tiles")
    packed = moe.prepare_experts(stored, shared, "packed")
    matrices = [tuple(values(m) for m in (e.w1, e.w3, e.w2)) for e in (*stored, shared)]
    worst, invariant = 0.0, True
    results = {}
    for tokens in (1, 12, 64, 700):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        weights = torch.rand(tokens, TOP_K, device="cuda")
        ids = torch.rand(tokens, num, device="cuda").argsort(1)[:, :TOP_K].int()
        got = moe.experts(x, ids, weights, packed, LIMIT, True)
        worst = max(worst, float((got.float() - reference_experts(x, ids, weights, matrices)).norm() / got.float().norm()))
        for first, last in ((0, 1), (tokens // 2, tokens), (tokens // 3, tokens // 3 + 17)):
            part = slice(first, min(last, tokens))
            invariant &= torch.equal(moe.experts(x[part], ids[part], weights[part], packed, LIMIT, True), got[part])
        results[f"error_{tokens}"] = worst
    return {"name": "experts at full width", "worst_error": worst, "rows_invariant": invariant}


def reference_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, matrices: list[tuple[torch.Tensor, ...]]
) -> torch.Tensor:
    x = round_fp8(x).float()
    total = torch.zeros_like(x)
    for slot in range(ids.shape[1] + 1):
        for e, (w1, w3, w2) in enumerate(matrices):
            chosen = (
                ids[:, slot] == e if slot < ids.shape[1] else torch.full((len(x),), e == len(matrices) - 1, device="cuda")
            )
            rows = chosen.nonzero().squeeze(1)
            if not len(rows):
                continue
            t = torch.nn.functional.silu((x[rows] @ w1.t()).clamp_max(LIMIT)) * (x[rows] @ w3.t()).clamp(-LIMIT, LIMIT)
            if slot < ids.shape[1]:
                t = t * weights[rows, slot, None]
            total[rows] += round_fp8(t) @ w2.t()
    return total


# ---- timings


def time_linears(ceilings: Ceilings) -> Rows:
    rows: Rows = []
    for name, (n, k) in LINEARS.items():
        copies = max(2, -(-8 * L2_BYTES // (n * k)))
        weights = [LinearWeight(n, k, random_packed("fp8", 1, n, k)) for _ in range(copies)]
        for tokens in (1, 8, 16, 64, 256, 1024, 8192):
            x = torch.randn(tokens, k, device="cuda").bfloat16()
            used = weights if tokens <= 64 else weights[:2]
            seconds = seconds_of([lambda w=w, x=x: linear(x, w) for w in used])
            rows.append(linear_row(f"linear {name}", tokens, n, k, seconds, ceilings))
    groups, n, k = WO_A
    weights = [LinearWeight(groups * n, k, random_packed("fp8", 1, groups * n, k)) for _ in range(16)]
    for tokens in (1, 8, 16, 64, 256, 1024, 8192):
        x = torch.randn(tokens, groups, k, device="cuda").bfloat16()
        used = weights if tokens <= 64 else weights[:2]
        seconds = seconds_of([lambda w=w, x=x: grouped_linear(x, w) for w in used])
        rows.append(linear_row("grouped_linear wo_a", tokens, groups * n, k, seconds, ceilings))
    x = torch.randn(8192, HIDDEN, device="cuda").bfloat16()
    seconds = seconds_of([lambda: round_fp8(x)] * 8)
    rows.append(
        {"name": "round_fp8", "tokens": 8192, "us": seconds * 1e6, "of_copy": 4 * x.numel() / seconds / ceilings.copy}
    )
    return rows


def linear_row(name: str, tokens: int, n: int, k: int, seconds: float, ceilings: Ceilings) -> dict[str, object]:
    moved = n * k * 8208 / 8192 + 2 * tokens * (k + n)
    return {
        "name": name,
        "tokens": tokens,
        "us": seconds * 1e6,
        "of_copy": moved / seconds / ceilings.copy,
        "of_bf16": 2 * tokens * n * k / seconds / ceilings.bf16,
    }


def routing(kind: str, count: int) -> torch.Tensor:
    """int32 [tokens, TOP_K]: `each` gives every expert `count` tokens; `random` routes `count` tokens evenly at random."""
    if kind == "each":
        return (torch.arange(count * EXPERTS, dtype=torch.int32, device="cuda") % EXPERTS).view(-1, TOP_K)
    return torch.rand(count, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].int()


def time_experts(ceilings: Ceilings) -> Rows:
    packed = PackedExperts(
        random_packed("fp4", EXPERTS, WIDTH, HIDDEN, paired=True),
        random_packed("fp4", EXPERTS, HIDDEN, WIDTH),
        random_packed("fp8", 1, WIDTH, HIDDEN, paired=True),
        random_packed("fp8", 1, HIDDEN, WIDTH),
    )
    weights = ExpertWeights(EXPERTS, HIDDEN, WIDTH, packed)
    cases = [("each", n) for n in (1, 2, 4, 8, 16, 24, 32, 64, 128)] + [("random", n) for n in (1, 8, 64, 256, 2048, 8192)]
    return [time_case(kind, count, weights, ceilings) for kind, count in cases]


def time_case(kind: str, count: int, weights: ExpertWeights, ceilings: Ceilings) -> dict[str, object]:
    packed: PackedExperts = weights.handle
    ids = routing(kind, count)
    tokens = len(ids)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    factors = torch.rand(tokens, TOP_K, device="cuda")
    repeats = 2 if tokens > 4096 else 4
    seconds = seconds_of([lambda: moe.experts(x, ids, factors, weights, LIMIT, True)] * repeats)
    _, row_weight, tiles = moe._sort(ids, factors, EXPERTS, packed.up.chunks.shape[1])
    sorted_x = round_fp8(torch.randn(tokens * TOP_K, HIDDEN, device="cuda").bfloat16())
    middle = torch.empty(tokens * TOP_K, WIDTH, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(sorted_x)
    swiglu = SwiGlu(LIMIT, True, row_weight)
    first = seconds_of([lambda: multiply(packed.up, sorted_x, middle, "swiglu", tiles=tiles, swiglu=swiglu)] * repeats)
    second = seconds_of([lambda: multiply(packed.down, middle, out, "bf16", tiles=tiles)] * repeats)
    hit = len(ids.unique())
    each = (packed.up.num_bytes + packed.down.num_bytes) / EXPERTS
    shared = packed.shared_up.num_bytes + packed.shared_down.num_bytes
    operations = 2 * 3 * HIDDEN * WIDTH * tokens * TOP_K
    return {
        "name": f"experts {kind} {count}",
        "tokens": tokens,
        "hit": hit,
        "us": seconds * 1e6,
        "of_copy": (hit * each + shared + 4 * tokens * HIDDEN) / seconds / ceilings.copy,
        "of_bf16": operations * (1 + 1 / TOP_K) / seconds / ceilings.bf16,
        "products_us": (first + second) * 1e6,
        "products_of_copy": hit * each / (first + second) / ceilings.copy,
        "products_of_bf16": operations / (first + second) / ceilings.bf16,
        "up_us": first * 1e6,
        "down_us": second * 1e6,
    }


def time_route(ceilings: Ceilings) -> Rows:
    gate = LinearWeight(EXPERTS, HIDDEN, random_packed("bf16", 1, EXPERTS, HIDDEN))
    bias = torch.zeros(EXPERTS, device="cuda")
    rows: Rows = []
    for tokens in (1, 64, 8192):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        seconds = seconds_of([lambda x=x: moe.route(x, gate, bias, TOP_K, 1.5)] * 8)
        rows.append({"name": "route", "tokens": tokens, "us": seconds * 1e6})
    return rows


def show(rows: Rows) -> None:
    for row in rows:
        cells = [
            f"{k}={v:.3f}" if isinstance(v, float) and v < 10 else f"{k}={v:.0f}" if isinstance(v, float) else f"{k}={v}"
            for k, v in row.items()
        ]
        print("  ".join(cells), flush=True)


def commit_here() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=["check", "linear", "route", "experts"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=None)
    arguments = parser.parse_args()
    build.build_all()
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    result: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "commit": arguments.commit or commit_here(),
        "torch": torch.__version__,
        "ceilings": asdict(ceilings),
    }
    show([asdict(ceilings)])
    sections: dict[str, Callable[[], Rows]] = {
        "check": lambda: [check_experts()],
        "linear": lambda: time_linears(ceilings),
        "route": lambda: time_route(ceilings),
        "experts": lambda: time_experts(ceilings),
    }
    for name in arguments.only:
        rows = sections[name]()
        result[name] = rows
        show(rows)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
