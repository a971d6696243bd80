"""Turn every "auto" of the settings into a decision, and refuse what cannot fit, before anything large is read."""

from __future__ import annotations

import logging
from dataclasses import replace

from ..config.engine import BLOCK_TOKENS, EngineConfig
from ..config.model import ModelConfig
from ..core.errors import CapacityExceeded, ConfigError
from .machine import Machine
from .memory import PROCESS_BYTES, MemoryPlan, plan_memory
from .units import readable

logger = logging.getLogger(__name__)


def resolve(model: ModelConfig, config: EngineConfig, machine: Machine | None = None) -> EngineConfig:
    """Settings with `weights`, `engram`, `num_blocks` and `num_threads` decided; each decision is logged.

    Args:
        machine: where the model is to run; None for this one.

    Raises:
        CapacityExceeded: with the numbers, if the model, its caches or the length asked for cannot fit.
        ConfigError: if a length is asked for that the model does not have.
    """
    machine = machine or Machine.this()
    limit = model.text.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len={config.max_model_len}: the model ends at {limit} tokens")
    plan = plan_memory(model, config, machine)
    _refuse_what_cannot_fit(plan, config)
    resolved = replace(
        config,
        weights=plan.held_as,
        engram=plan.engram,
        num_blocks=plan.num_blocks,
        num_threads=config.num_threads or machine.num_processors,
    )
    for name in ("weights", "engram", "num_blocks", "num_threads"):
        if getattr(config, name) != getattr(resolved, name):
            logger.info("%s=%s, chosen for %s of memory", name, getattr(resolved, name), readable(machine.memory_bytes))
    return resolved


def _refuse_what_cannot_fit(plan: MemoryPlan, config: EngineConfig) -> None:
    if config.cache_bytes is not None and plan.num_blocks == 0:
        raise CapacityExceeded(
            f"cache_bytes={config.cache_bytes}: one block of {BLOCK_TOKENS} tokens takes {readable(plan.block_bytes)}"
        )
    if plan.shortfall > 0:
        raise CapacityExceeded(_shortfall_text(plan))
    tokens = plan.num_blocks * BLOCK_TOKENS
    if config.max_model_len is not None and config.max_model_len > tokens:
        raise CapacityExceeded(
            f"max_model_len={config.max_model_len}: the caches hold {tokens} tokens ({readable(plan.pool_bytes)}). "
            "Lower it, or raise cache_bytes"
        )


def _shortfall_text(plan: MemoryPlan) -> str:
    blocks = max(1, plan.num_blocks)
    parts = (
        (f"weights ({plan.held_as}, Engram {plan.engram})", plan.weight_bytes),
        ("working memory", plan.working_bytes),
        (f"state of {plan.num_slots} sequences", plan.num_slots * plan.slot_bytes),
        (f"{blocks} cache block{'s' if blocks > 1 else ''}", blocks * plan.block_bytes),
        ("the program itself", PROCESS_BYTES),
    )
    listed = ", ".join(f"{what} {readable(size)}" for what, size in parts)
    ways = ["lower max_num_seqs, max_num_batched_tokens or num_blocks", "use a machine with more memory"]
    if plan.engram == "memory":
        ways.insert(0, "set engram to mmap")
    if plan.held_as == "decoded":
        ways.insert(0, "set weights to packed")
    where = "each device" if plan.machine.num_devices else "this machine"
    return (
        f"does not fit: needs {listed}; {where} can give {readable(plan.usable_bytes)}, so {readable(plan.shortfall)} "
        f"are missing. Either {'; or '.join(ways)}"
    )
