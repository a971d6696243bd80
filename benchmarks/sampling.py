"""Time to draw the tokens of a step, with the vocabulary of 129,280 tokens.

    python benchmarks/sampling.py [--rows 64] [--threads 2] [--backend native] [--repeats 9]

Each case draws a token for every row, through the sampler that the engine uses, from logits with a few likely tokens and a
long tail. "ms" is the fastest of the repeats, "cpu ms" the time of all threads together in that one. Prints a table and one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np
import torch

from abyssal.backends.cpu.table import cpu_table
from abyssal.core.sampling_params import SamplingParams
from abyssal.runner.logit_rules import TokenRoles
from abyssal.runner.sampler import Sampler, SamplingRow

VOCAB_SIZE = 129_280
TARGETS_MS = {"greedy": 15.0, "top-p and top-k": 60.0}
"""With 64 rows and two free cores."""

CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "top-p and top-k": {"top_p": 0.95, "top_k": 50},
    "top-p and top-k, joint": {"top_p": 0.95, "top_k": 50, "top_k_top_p": "joint"},
    "penalties, top-p and top-k": {"top_p": 0.95, "top_k": 50, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "grammar, top-p and top-k": {"top_p": 0.95, "top_k": 50},
    "greedy, 5 log-probabilities": {"temperature": 0.0, "logprobs": 5},
    "top-p and top-k, 5 processed": {"top_p": 0.95, "top_k": 50, "logprobs": 5, "logprobs_mode": "processed"},
}


def random_logits(rows: int) -> torch.Tensor:
    """float32 [rows, vocab]: few likely tokens at random ids before a long tail, as models have."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, VOCAB_SIZE)).astype(np.float32) * 2
    for row in logits:
        row[rng.choice(VOCAB_SIZE, 400, replace=False)] += np.linspace(16, 4, 400, dtype=np.float32)
    return torch.from_numpy(logits)


def rows_of(sampler: Sampler, name: str, count: int) -> list[SamplingRow]:
    """The rows of a case: penalties know 2,000 tokens, a grammar allows half of the vocabulary."""
    rng = np.random.default_rng(1)
    rows = []
    for row in range(count):
        params = SamplingParams(**CASES[name])  # type: ignore[arg-type]
        known = rng.integers(0, VOCAB_SIZE, 2000).tolist()
        mask = None
        if name.startswith("grammar"):
            mask = rng.integers(-(2**31), 2**31, VOCAB_SIZE // 32, dtype=np.int64).astype(np.int32)
        rows.append(SamplingRow(params, row, 100, sampler.rules_of(params, known, 1000), (), mask))
    return rows


def measure(sampler: Sampler, logits: torch.Tensor, rows: Sequence[SamplingRow], repeats: int) -> tuple[float, float]:
    """Milliseconds of a call: by the clock, and of all threads."""
    times = []
    for _ in range(repeats):
        began, busy = time.perf_counter(), time.process_time()
        sampler.sample(logits, rows)
        times.append(((time.perf_counter() - began) * 1e3, (time.process_time() - busy) * 1e3))
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name, default in (("rows", 64), ("threads", 2), ("repeats", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", choices=("native", "torch"), default="native")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sampler = Sampler(cpu_table(options.backend, options.threads), TokenRoles(VOCAB_SIZE))
    logits = random_logits(options.rows)
    print(f"{options.rows} rows of {VOCAB_SIZE:,} tokens, {options.threads} threads, {options.backend}")
    print(f"{'case':32}{'ms':>10}{'cpu ms':>10}{'target':>10}")
    results = {}
    for name in CASES:
        clock, busy = measure(sampler, logits, rows_of(sampler, name, options.rows), options.repeats)
        results[name] = {"ms": clock, "processor_ms": busy, "target_ms": TARGETS_MS.get(name)}
        print(f"{name:32}{clock:10.2f}{busy:10.2f}{TARGETS_MS.get(name, ''):>10}")
    print(json.dumps({"benchmark": "sampling", "rows": options.rows, "threads": options.threads, "cases": results}))


if __name__ == "__main__":
    main()
