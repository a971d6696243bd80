"""Plans and models as tables for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config.engine import BLOCK_TOKENS, EngineConfig
from ..config.model import ModelConfig, TextConfig
from ..config.topology import LayerPlan, Topology
from ..loading.names import expected_tensors
from .machine import Machine
from .memory import PROCESS_BYTES, MemoryPlan, WeightClass, plan_memory, weight_classes
from .units import readable

CONTEXTS = (1024, 8192, 65536, 262144, 1048576)
"""Lengths of sequences for which a plan tells how many fit."""


def print_plan(
    model: ModelConfig,
    config: EngineConfig,
    *,
    memory_bytes: int | None = None,
    num_devices: int = 0,
    as_json: bool = False,
    console: Console | None = None,
) -> MemoryPlan:
    """Print what a model needs and what fits.

    Args:
        memory_bytes: of the host, or of each device; None for what this machine has free.
        num_devices: accelerators; 0 for the host's processors.
        as_json: print one JSON object instead of tables.
        console: where to print; None for standard output.

    Returns:
        The plan, so that a caller can tell whether it fits (`shortfall`).
    """
    here = Machine.this()
    machine = Machine(here.memory_bytes if memory_bytes is None else memory_bytes, here.num_processors, num_devices)
    plan = plan_memory(model, config, machine)
    console = console or Console()
    if as_json:
        console.out(json.dumps(plan_json(plan)), highlight=False)
        return plan
    console.print(_weights_table(plan.weights))
    console.print(_memory_table(plan))
    console.print(_fit_table(plan))
    console.print(_verdict(plan), highlight=False)
    return plan


def plan_json(plan: MemoryPlan) -> dict[str, Any]:
    """A plan as plain values; sizes in bytes."""
    return {
        "memory_bytes": plan.machine.memory_bytes,
        "usable_bytes": plan.usable_bytes,
        "num_devices": plan.machine.num_devices,
        "weights": _classes_json(plan.weights),
        "held_as": plan.held_as,
        "engram": plan.engram,
        "weight_bytes": plan.weight_bytes,
        "mapped_bytes": plan.mapped_bytes,
        "working_bytes": plan.working_bytes,
        "process_bytes": PROCESS_BYTES,
        "bytes_per_token": plan.bytes_per_token,
        "bytes_per_token_packed": plan.bytes_per_token_packed,
        "bytes_per_sequence": plan.slot_bytes,
        "bytes_per_sequence_packed": plan.slot_bytes_packed,
        "max_num_seqs": plan.num_slots,
        "num_blocks": plan.num_blocks,
        "cache_bytes": plan.pool_bytes,
        "cached_tokens": plan.num_blocks * BLOCK_TOKENS,
        "sequences_that_fit": {str(context): plan.num_sequences(context) for context in _contexts(plan)},
        "fits": plan.shortfall <= 0,
        "shortfall_bytes": max(0, plan.shortfall),
    }


def print_inspect(model: ModelConfig, *, as_json: bool = False, console: Console | None = None) -> None:
    """Print a model's layers with their roles, and its tensors by kind."""
    console = console or Console()
    if as_json:
        console.out(json.dumps(inspect_json(model)), highlight=False)
        return
    console.print(_dimensions_table(model))
    console.print(_layers_table(model.text))
    console.print(_weights_table(weight_classes(expected_tensors(model))))


def inspect_json(model: ModelConfig) -> dict[str, Any]:
    """A model's layers and tensors as plain values."""
    classes = weight_classes(expected_tensors(model))
    return {
        "layers": [
            {
                "layer": plan.layer_id,
                "ratio": plan.ratio,
                "kv_source": plan.kv_source,
                "index_source": plan.index_source,
                "roles": _roles(plan),
            }
            for plan in Topology.of(model.text).layers
        ],
        "tensors": _classes_json(classes),
        "num_tensors": sum(c.num_tensors for c in classes),
        "stored_bytes": sum(c.stored_bytes for c in classes),
    }


def _classes_json(classes: Sequence[WeightClass]) -> list[dict[str, Any]]:
    return [
        {
            "kind": c.kind,
            "part": c.part,
            "num_tensors": c.num_tensors,
            "stored_bytes": c.stored_bytes,
            "decoded_bytes": c.decoded_bytes,
        }
        for c in classes
    ]


def _table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    return table


def _weights_table(classes: Sequence[WeightClass]) -> Table:
    table = _table("Weights by class", "class", "tensors", "on disk", "as float32")
    table.add_column("loaded")
    for c in classes:
        loaded_now = {"text": "yes", "draft": "for speculation", "vision": "no"}[c.part]
        name = c.kind.replace("_", " ")
        table.add_row(name, f"{c.num_tensors:,}", readable(c.stored_bytes), readable(c.decoded_bytes), loaded_now)
    table.add_section()
    loaded = [c for c in classes if c.part == "text"]
    for name, group in (("text model", loaded), ("checkpoint", classes)):
        tensors = sum(c.num_tensors for c in group)
        stored, decoded = sum(c.stored_bytes for c in group), sum(c.decoded_bytes for c in group)
        table.add_row(name, f"{tensors:,}", readable(stored), readable(decoded), "")
    return table


def _memory_table(plan: MemoryPlan) -> Table:
    on_devices = plan.machine.num_devices
    table = _table(f"Memory of each of {on_devices} devices" if on_devices else "Memory", "what", "size")
    table.add_column("how")
    slots = plan.num_slots
    table.add_row("weights", readable(plan.weight_bytes), f"{plan.held_as}, Engram tables: {plan.engram}")
    if plan.mapped_bytes:
        table.add_row("mapped files", readable(plan.mapped_bytes), "not counted; faster if the page cache holds them")
    table.add_row("working memory", readable(plan.working_bytes), "estimate for one step")
    table.add_row("program", readable(PROCESS_BYTES), "estimate")
    slot_packed, token_packed = (
        "" if on_devices else f"; packed {readable(size)}" for size in (plan.slot_bytes_packed, plan.bytes_per_token_packed)
    )
    per_slot = f"{readable(plan.slot_bytes)} each{slot_packed}"
    table.add_row(f"state of {slots} sequences", readable(slots * plan.slot_bytes), per_slot)
    per_token = f"{readable(plan.bytes_per_token)} per token of context{token_packed}"
    table.add_row(f"{plan.num_blocks:,} cache blocks", readable(plan.pool_bytes), per_token)
    table.add_section()
    table.add_row("needed", readable(plan.fixed_bytes + plan.pool_bytes), "")
    table.add_row("usable", readable(plan.usable_bytes), f"of {readable(plan.machine.memory_bytes)}")
    return table


def _contexts(plan: MemoryPlan) -> list[int]:
    shorter = [context for context in CONTEXTS if context < plan.context_limit]
    return [*shorter, plan.context_limit]


def _fit_table(plan: MemoryPlan) -> Table:
    table = _table("What fits beside the weights", "tokens of context", "sequences")
    for context in _contexts(plan):
        table.add_row(f"{context:,}", f"{plan.num_sequences(context):,}")
    return table


def _verdict(plan: MemoryPlan) -> str:
    if plan.shortfall > 0:
        return f"Does not fit: {readable(plan.shortfall)} are missing."
    return f"Fits: {plan.num_slots} sequences at a time, {plan.num_blocks * BLOCK_TOKENS:,} tokens of context among them."


def _dimensions_table(model: ModelConfig) -> Table:
    text = model.text
    table = _table("Model", "dimension", "value")
    for name, value in (
        ("layers", text.num_hidden_layers),
        ("hidden size, residual streams", f"{text.hidden_size} x {text.hc_mult}"),
        ("attention heads", f"{text.num_attention_heads} x {text.head_dim}"),
        ("window", text.sliding_window),
        ("index heads, entries selected", f"{text.index_n_heads} x {text.index_head_dim}, {text.index_topk}"),
        (
            "experts, of which active",
            f"{text.n_routed_experts}, {text.num_experts_per_tok} + {text.n_shared_experts} shared",
        ),
        ("Engram rows", " + ".join(f"{rows:,}" for rows in text.engram_num_embeddings)),
        ("vocabulary", text.vocab_size),
        ("longest sequence", text.max_position_embeddings),
        ("draft stages", text.num_nextn_predict_layers),
        ("vision layers", model.vision.num_hidden_layers),
    ):
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    return table


def _layers_table(text: TextConfig) -> Table:
    table = _table("Layers", "layers", "ratio", "KV of", "selection of")
    table.add_column("roles")
    for first, last in _runs(Topology.of(text).layers):
        ids = str(first.layer_id) if first is last else f"{first.layer_id}-{last.layer_id}"
        sources = ["-" if source is None else str(source) for source in (first.kv_source, first.index_source)]
        table.add_row(ids, str(first.ratio), *sources, ", ".join(_roles(first)))
    return table


def _runs(layers: Sequence[LayerPlan]) -> list[tuple[LayerPlan, LayerPlan]]:
    """First and last of each run of layers that do the same."""
    runs: list[tuple[LayerPlan, LayerPlan]] = []
    for layer in layers:
        if runs and _behaviour(runs[-1][0]) == _behaviour(layer):
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return runs


def _behaviour(plan: LayerPlan) -> tuple[Any, ...]:
    return plan.ratio, plan.kv_source, plan.index_source, _roles(plan)


def _roles(plan: LayerPlan) -> list[str]:
    roles = (
        ("engram", plan.engram_index is not None),
        ("compresses", plan.owns_compressed),
        ("selects", plan.selects),
        ("candidate source", plan.is_candidate_source),
        ("selects among candidates", plan.uses_candidates),
    )
    return [name for name, holds in roles if holds]
