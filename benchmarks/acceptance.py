"""What coupled acceptance costs against rejection, on synthetic distributions with the spread of language.

Blocks of 5 drafts, each drawn by the drafter's distribution and judged by the target's, by the rules that the engine runs,
beside what theory says of the same blocks: rejection keeps a draft with probability 1 - TV, coupling with
sum_v 1 / sum_w max(p_w / p_v, q_w / q_v), at least (1 - TV) / (1 + TV). Repeated for drafters from good to bad; the marked
one accepts what is published for the released model on code, 2.5 tokens of 5 by rejection. Ends with one line of JSON.

    python benchmarks/acceptance.py [--blocks 600] [--repeats 5] [--noises 0.02,0.05,0.13,0.3]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from abyssal.backends.cpu.table import cpu_table
from abyssal.core.sampling_params import SamplingParams
from abyssal.runner.logit_rules import TokenRoles
from abyssal.runner.sampler import Sampler, SamplingRow
from abyssal.runner.verify import AcceptanceRule, CoupledAcceptance, RejectionAcceptance, Verification


def load_synthetic() -> ModuleType:
    """The generator that the tests use."""
    path = Path(__file__).parents[1] / "tests" / "support" / "synthetic_drafts.py"
    spec = importlib.util.spec_from_file_location("synthetic_drafts", path)
    assert spec is not None, f"{path} is missing"
    assert spec.loader is not None, f"{path} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    sys.modules["synthetic_drafts"] = module
    spec.loader.exec_module(module)
    return module


def simulate(rule: AcceptanceRule, target: torch.Tensor, drafter: torch.Tensor, seed: int) -> int:
    """How many drafts of a block are kept: logits float32 [places, vocab] of both."""
    params, drafts = SamplingParams(temperature=1.0), []
    for place in range(len(drafter)):
        row = SamplingRow(params, seed, 1 + place)
        drafts += rule.draft(drafter[place : place + 1], [0], [row], place)
    logits = torch.cat((target, target[-1:]))  # of the token behind the last draft, which is not looked at
    (tokens,) = rule.verify(logits, [Verification(0, 0, tuple(drafts), params, seed, 1)])
    return len(tokens) - 1


def measure(noise: float, num_blocks: int, repeats: int) -> dict[str, Any]:
    """Accepted tokens of a block, by theory and as simulated."""
    synthetic = load_synthetic()
    sampler = Sampler(cpu_table("auto", 1), TokenRoles(synthetic.VOCAB_SIZE))
    rules = {"rejection": RejectionAcceptance(sampler), "coupled": CoupledAcceptance(sampler)}
    formulas = {
        "rejection": synthetic.kept_by_rejection,
        "coupled": synthetic.kept_by_coupling,
        "least": synthetic.least_by_coupling,
    }
    kept: dict[str, list[list[float]]] = {name: [] for name in formulas}
    drawn: dict[str, list[int]] = {name: [] for name in rules}
    for i, block in enumerate(synthetic.blocks(num_blocks, noise)):
        p, q = synthetic.softmax(block.target), synthetic.softmax(block.drafter)
        for name, formula in formulas.items():
            kept[name].append([formula(*pair) for pair in zip(p, q, strict=True)])
        target, drafter = torch.from_numpy(block.target), torch.from_numpy(block.drafter)
        for name, rule in rules.items():
            drawn[name] += [simulate(rule, target, drafter, i * repeats + k) for k in range(repeats)]
    theory = {name: synthetic.accepted_tokens(np.array(values)) for name, values in kept.items()}
    simulated = {name: float(np.mean(values)) for name, values in drawn.items()}
    return {
        "noise": noise,
        "theory": theory,
        "simulated": simulated,
        "standard_error": {name: float(np.std(values) / len(values) ** 0.5) for name, values in drawn.items()},
        "loss": 1 - theory["coupled"] / theory["rejection"],
        "loss_simulated": 1 - simulated["coupled"] / simulated["rejection"],
        "loss_of_bound": 1 - theory["least"] / theory["rejection"],
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--noises", default="0.02,0.05,0.13,0.3")
    args = parser.parse_args()
    published = load_synthetic().PUBLISHED_NOISE
    results = [measure(float(noise), args.blocks, args.repeats) for noise in args.noises.split(",")]
    print("noise of   accepted of 5: rejection         coupled              fewer by coupling")
    print("the drafter   theory  simulated    theory  simulated    theory  simulated  at most")
    for r in results:
        theory, simulated, error = r["theory"], r["simulated"], r["standard_error"]
        cells = [f"{theory[n]:6.3f}  {simulated[n]:.3f} ± {error[n]:.3f}" for n in ("rejection", "coupled")]
        losses = f"{100 * r['loss']:5.1f}% {100 * r['loss_simulated']:9.1f}% {100 * r['loss_of_bound']:8.1f}%"
        print(f"{r['noise']:8.2f}     {'   '.join(cells)}   {losses}{'  as published' * (r['noise'] == published)}")
    print(json.dumps({"benchmark": "acceptance", "blocks": args.blocks, "repeats": args.repeats, "results": results}))


if __name__ == "__main__":
    main()
