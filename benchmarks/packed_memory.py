"""Peak memory of a model held packed, against the size of its checkpoint and against holding it decoded.

    python benchmarks/packed_memory.py [--gigabytes 1.0]

Writes a random checkpoint of about that size, loads and runs it in a process of its own for each way of holding weights, and
compares the peak of resident memory, mapped pages of the checkpoint included. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from abyssal.loading.random_checkpoint import write_random_checkpoint

CHILD = """
import json, resource, sys
from abyssal.config.engine import EngineConfig
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.engine import Engine
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
engine = Engine(sys.argv[1], EngineConfig(weights=sys.argv[2], engram="mmap", num_blocks=8, max_num_seqs=2))
engine.add(list(range(11, 311)), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False))
ids = []
while engine.has_unfinished:
    for output in engine.step():
        ids = output.outputs[0].token_ids
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"base": base * 1024, "peak": peak * 1024, "ids": ids}))
"""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--packed-only", action="store_true", help="leave out the decoded run, which takes eight times that")
    args = parser.parse_args()
    # an expert of this width takes 3 * 512 * 256 values of 4.25 bits; eight layers share the rest
    experts = max(8, int(args.gigabytes * 1e9 / 8 / (3 * 1024 * 512 * 4.25 / 8)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_checkpoint(
            folder, "micro", seed=7, hidden_size=1024, moe_intermediate_size=512, n_routed_experts=experts
        )
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        result: dict[str, dict[str, object]] = {}
        for held_as in ("packed",) if args.packed_only else ("packed", "decoded"):
            run = subprocess.run(
                [sys.executable, "-c", CHILD, str(folder), held_as], capture_output=True, text=True, check=True
            )
            result[held_as] = json.loads(run.stdout.splitlines()[-1])
    assert all(r["ids"] == result["packed"]["ids"] for r in result.values()), "the two ways of holding weights differ"
    for held_as, figures in result.items():
        peak = int(str(figures["peak"]))
        print(f"{held_as:8s} peak {peak / 1e6:8.0f} MB, {peak / size:.2f} of a checkpoint of {size / 1e6:.0f} MB")
    share = int(str(result["packed"]["peak"])) / size
    print(json.dumps({"checkpoint_bytes": size, "packed_share": share, **{k: v["peak"] for k, v in result.items()}}))


if __name__ == "__main__":
    main()
