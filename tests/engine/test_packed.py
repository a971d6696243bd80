"""Weights held packed: the same bits as decoded, in little more memory than the checkpoint takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from abyssal.config.engine import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.loading.random_checkpoint import write_random_checkpoint

RUN = """
import json, resource, sys
from abyssal.config.engine import EngineConfig
from abyssal.engine.engine import Engine
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
config = EngineConfig(weights=sys.argv[2], engram="mmap", num_blocks=4, max_num_seqs=1, num_threads=1)
Engine(sys.argv[1], config).score(list(range(11, 211)))
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))
"""


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_same_logits(checkpoint_of, preset, backend):
    ids = list(range(11, 81))
    decoded, packed = (
        Engine(
            checkpoint_of(preset),
            EngineConfig(weights=held_as, engram=engram, num_blocks=4, max_num_seqs=1, num_threads=1, backend=backend),
        ).score(ids)
        for held_as, engram in (("decoded", "memory"), ("packed", "mmap"))
    )
    assert torch.equal(decoded, packed)


@pytest.mark.slow
def test_peak_memory(tmp_path):
    """Beyond what the process takes before a model is there, the checkpoint's size plus a quarter."""
    folder = tmp_path / "wide"
    write_random_checkpoint(folder, "micro", seed=7, hidden_size=512, moe_intermediate_size=512, n_routed_experts=48)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size > 150e6

    def peak(held_as: str) -> int:
        run = subprocess.run([sys.executable, "-c", RUN, str(folder), held_as], capture_output=True, text=True, check=True)
        return json.loads(run.stdout.splitlines()[-1])

    assert peak("packed") < 1.25 * size
    assert peak("decoded") > 3 * size  # what the bound is there to tell apart
