"""A card is asked for where there is none."""

from __future__ import annotations

import pytest
import torch

from abyssal.config.engine import EngineConfig
from abyssal.core.errors import ConfigError, UnsupportedOnBackend
from abyssal.engine.engine import Engine


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_no_card(checkpoint_of):
    with pytest.raises(UnsupportedOnBackend, match="no NVIDIA card"):
        Engine(checkpoint_of("micro"), EngineConfig(device="cuda"))


def test_unknown_device():
    with pytest.raises(ConfigError, match="device='tpu'"):
        EngineConfig(device="tpu")  # type: ignore[arg-type]
