"""Shared fixtures: golden tensors, checkpoints made once for each run, engines."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from safetensors.torch import load_file

DATA = Path(__file__).parent / "data"


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden_of():
    """Golden tensors of a preset by name, computed by two implementations that share no code with this one."""
    cache: dict[str, dict[str, torch.Tensor]] = {}

    def load(preset: str) -> dict[str, torch.Tensor]:
        if preset not in cache:
            cache[preset] = load_file(str(DATA / f"{preset}.safetensors"))
        return cache[preset]

    return load


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory):
    """Folder of the checkpoint that the golden tensors belong to, written once for each worker."""
    from abyssal.loading.random_checkpoint import write_random_checkpoint

    folders: dict[str, Path] = {}

    def make(preset: str) -> Path:
        if preset not in folders:
            folders[preset] = tmp_path_factory.mktemp("checkpoints") / preset
            write_random_checkpoint(folders[preset], preset, seed=7)
        return folders[preset]

    return make
