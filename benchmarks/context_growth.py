"""Decode time of one stream as its context grows, on random weights.

    python benchmarks/context_growth.py [--preset deep] [--contexts 128,1024,8192]

What grows is the scoring of compressed entries by the index layers that see all of them, which is linear in context but
small beside the rest. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from abyssal.config.engine import EngineConfig
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.engine import Engine
from abyssal.loading.random_checkpoint import write_random_checkpoint


def decode_ms(engine: Engine, context: int, tokens: int) -> float:
    """Median milliseconds of a decode step after a prompt of `context` tokens."""
    generator = random.Random(0)
    prompt = [generator.randrange(11, 400) for _ in range(context)]
    engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True, detokenize=False))
    while not engine.step():
        pass
    times = []
    while engine.has_unfinished:
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="deep")
    parser.add_argument("--contexts", default="128,1024,8192")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    contexts = [int(c) for c in args.contexts.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_checkpoint(folder, args.preset, seed=7)
        blocks = -(-(max(contexts) + args.tokens + 1) // 128) + 1
        engine = Engine(folder, EngineConfig(num_blocks=blocks, max_num_seqs=1))
        decode_ms(engine, contexts[0], 8)
        result = {context: decode_ms(engine, context, args.tokens) for context in contexts}
    for context, value in result.items():
        print(f"{context:7d} tokens of context: {value:.2f} ms a token")
    growth = result[contexts[-1]] / result[contexts[0]]
    print(json.dumps({"preset": args.preset, "decode_ms": result, "growth": growth}))


if __name__ == "__main__":
    main()
