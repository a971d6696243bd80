"""What decides the answers of a job beside its input: the model's files and those settings that change output."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.engine import EngineConfig

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from .journal import Facts

_READ_WHOLE = ("config.json", "generation_config.json", "tokenizer.json")
_SAMPLE_BYTES = 4096

WITHOUT_EFFECT = frozenset(
    (
        "weights",
        "engram",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_blocks",
        "cache_bytes",
        "num_threads",
        "overlap",
        "policy",
        "preemption",
    )
)
"""Settings that change speed and memory but no token. One that is not named here is taken to change output."""


def settings_facts(config: EngineConfig) -> Facts:
    """The settings that change output, as far as they are decided: "auto" is left out."""
    facts: dict[str, str | int | float | bool | None] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in WITHOUT_EFFECT and value != "auto":
            facts[field.name] = value
    # Coupled drafts leave output as it is, whatever their number.
    is_lossless = facts.pop("acceptance", "coupled") == "coupled" or config.speculation == "off"
    facts["speculation"] = "lossless" if is_lossless else f"rejection, {config.speculation}"
    facts["seed"] = config.seed or 0
    return facts


def folder_facts(folder: Path) -> Facts:
    """A digest of a model folder: its small files, and size and a sample of each shard."""
    digest = hashlib.sha256()
    shards = sorted(folder.glob("*.safetensors"))
    for path in [*(folder / name for name in _READ_WHOLE), *shards]:
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                if path in shards:
                    file.seek(size // 2)
                    digest.update(file.read(_SAMPLE_BYTES))
                else:
                    digest.update(file.read())
    return {"model_files": digest.hexdigest()[:16]}


def engine_facts(engine: Engine) -> Facts:
    """What can be said of an engine that is there."""
    facts = settings_facts(engine.config)
    return facts if engine.tokenizer is None else {**facts, **folder_facts(engine.tokenizer.path.parent)}


def model_name_of(engine: Engine) -> str:
    """The name of the model's folder."""
    return "model" if engine.tokenizer is None else engine.tokenizer.path.parent.resolve().name
