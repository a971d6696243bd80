"""Open the parameters of a model folder, as the settings say."""

from __future__ import annotations

from pathlib import Path

from ..config.engine import EngineConfig
from ..config.model import ModelConfig
from .dummy import DummyCheckpoint
from .safetensors import Checkpoint
from .source import TensorSource
from .weights import StoredWeights


def open_weights(
    folder: Path, model_config: ModelConfig, config: EngineConfig, kind: type[StoredWeights] = StoredWeights
) -> StoredWeights:
    """Check the checkpoint against its configuration, and give access to its parameters. Reads headers only.

    Args:
        kind: how the parameters are handed out.

    Raises:
        CheckpointError: listing everything that is wrong with it.
    """
    source: TensorSource
    if config.load_format == "dummy":
        source = DummyCheckpoint(model_config)
    else:
        source = checkpoint = Checkpoint.open(folder)
        checkpoint.check(model_config)
    return kind(source, engram_in_memory=config.engram == "memory")
