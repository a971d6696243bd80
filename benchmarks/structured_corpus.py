"""Counts for structured output: random schemas accepted, refused, and what a random model writes under the accepted ones.

Each seed is a schema over all keywords of JSON Schema and their combinations. An accepted one is written under by a random
model (uniform or Zipf over a shuffled small vocabulary) for up to 64 tokens and then steered to an end; the jsonschema
library judges the text. Probes are texts written under a relaxed schema: the ones that are invalid have to be rejected.
Prints the counts and one line of JSON; any number behind "invalid", "stuck" or "invalid probes accepted" is a fault.

    python benchmarks/structured_corpus.py [--schemas 2560] [--first-seed 0]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

from abyssal.structured.compiler import GrammarCompiler


def load_corpus() -> ModuleType:
    """The generator that the tests use."""
    path = Path(__file__).parents[1] / "tests" / "support" / "schema_corpus.py"
    spec = importlib.util.spec_from_file_location("schema_corpus", path)
    assert spec is not None, f"{path} is missing"
    assert spec.loader is not None, f"{path} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    sys.modules["schema_corpus"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--schemas", type=int, default=2560)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    corpus = load_corpus()
    vocabulary = corpus.make_vocabulary()
    compiler = GrammarCompiler(vocabulary)
    counts: Counter[str] = Counter()
    problems: list[str] = []
    started = time.perf_counter()
    for seed in range(options.first_seed, options.first_seed + options.schemas):
        corpus.check_seed(seed, compiler, vocabulary, counts, problems)
    seconds = time.perf_counter() - started
    rows = {
        "schemas": options.schemas,
        "accepted": counts["accepted"],
        "refused, with a path": counts["refused with a path"],
        "refused, without a path": counts["refused"] - counts["refused with a path"],
        "answers completed": counts["done"],
        "valid": counts["valid"],
        "invalid": counts["invalid"],
        "stuck": counts["stuck"],
        "not completed in time": counts["unfinished"],
        "invalid probes rejected": counts["probe invalid rejected"],
        "invalid probes accepted": counts["probe invalid accepted"],
        "valid probes accepted": counts["probe valid accepted"],
        "valid probes rejected": counts["probe valid rejected"],
    }
    for name, count in rows.items():
        print(f"{name:28}{count:8,}")
    for problem in problems[:20]:
        print(problem)
    print(json.dumps({"benchmark": "structured_corpus", "seconds": round(seconds, 1), **rows}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
