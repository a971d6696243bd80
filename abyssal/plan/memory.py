"""The memory plan: weights by class, caches by token and by sequence, and what is left for them.

On the host's processors, weights are held decoded (float32) or packed (mapped from the checkpoint, decoded at each use), and
cache rows are float32. On devices, weights and cache rows are packed; experts and Engram tables are divided over the
devices, and everything else is replicated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..cache.spec import CacheSpec
from ..config.engine import BLOCK_TOKENS, EngineConfig, parse_speculation
from ..config.model import ModelConfig
from ..config.topology import Topology
from ..loading.names import Part, TensorSpec, expected_tensors
from .machine import Machine

SPARE = 0.1
"""Share of memory left to the system and to what is not counted."""

CACHE_SHARE = 0.5
"""Share of what weights leave that cache blocks take, unless a size is given."""

PROCESS_BYTES = 400 << 20
"""The interpreter and its libraries."""

SCRATCH_BYTES = 128 << 20
"""Bounded scratch of attention and selection."""

ROW_COPIES = 6
"""How many times a row's residual streams are alive at once, roughly."""

EXPERT_KINDS = frozenset({"experts", "expert_scales", "draft_experts", "draft_expert_scales"})
ENGRAM_KINDS = frozenset({"engram_tables", "engram_table_scales"})
DIVIDED_KINDS = EXPERT_KINDS | ENGRAM_KINDS
VECTOR_KINDS = frozenset({"norms", "sinks", "engram_norms", "draft_norms", "draft_sinks"})
"""Small enough to be float32 always."""

KEPT_AS_STORED = "embed.weight"
"""Read row by row, so it is never decoded as a whole."""

HeldAs = Literal["decoded", "packed"]
EngramAt = Literal["memory", "mmap"]


@dataclass(frozen=True)
class WeightClass:
    """Tensors of one kind.

    Attributes:
        stored_bytes: in the checkpoint.
        decoded_bytes: as float32 (tables that are read row by row: as stored).
        part: "text" is loaded, "draft" with `speculation`; "vision" is recognised only.
    """

    kind: str
    part: Part
    num_tensors: int
    stored_bytes: int
    decoded_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """What a model needs on a machine. Sizes in bytes, of the host or of each device.

    Attributes:
        weight_bytes: parameters that take memory of their own.
        mapped_bytes: parameters that are mapped from files; faster if the page cache holds them.
        working_bytes: activations of one step and scratch, estimated.
        bytes_per_token: by which caches grow with context, as held here.
        slot_bytes: per sequence, as held here.
        num_slots: sequences at a time.
        num_blocks: cache blocks of 128 tokens; 0 if not even one fits.
        context_limit: tokens of one sequence at most, by settings and model.
    """

    machine: Machine
    weights: tuple[WeightClass, ...]
    held_as: HeldAs
    engram: EngramAt
    weight_bytes: int
    mapped_bytes: int
    working_bytes: int
    bytes_per_token: float
    bytes_per_token_packed: float
    slot_bytes: int
    slot_bytes_packed: int
    num_slots: int
    num_blocks: int
    context_limit: int

    @property
    def block_bytes(self) -> int:
        return int(self.bytes_per_token * BLOCK_TOKENS)

    @property
    def usable_bytes(self) -> int:
        """Memory less what is spared for the system."""
        return int(self.machine.memory_bytes * (1 - SPARE))

    @property
    def fixed_bytes(self) -> int:
        """What is needed before any cache block."""
        return PROCESS_BYTES + self.weight_bytes + self.working_bytes + self.num_slots * self.slot_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def shortfall(self) -> int:
        """Bytes that are missing for the plan with at least one block; 0 or less if it fits."""
        return self.fixed_bytes + max(self.pool_bytes, self.block_bytes) - self.usable_bytes

    def num_sequences(self, context: int) -> int:
        """How many sequences of a length fit together in what weights and scratch leave."""
        left = self.usable_bytes - PROCESS_BYTES - self.weight_bytes - self.working_bytes
        each = self.slot_bytes + math.ceil(context / BLOCK_TOKENS) * self.block_bytes
        return max(0, left // each)


def weight_classes(specs: dict[str, TensorSpec]) -> tuple[WeightClass, ...]:
    """Tensors grouped by kind, in order of appearance."""
    sums: dict[tuple[str, Part], list[int]] = {}
    for name, spec in specs.items():
        counted = sums.setdefault((spec.kind, spec.part), [0, 0, 0])
        counted[0] += 1
        counted[1] += spec.num_bytes
        counted[2] += decoded_bytes(name, spec)
    return tuple(WeightClass(kind, part, *counted) for (kind, part), counted in sums.items())


def decoded_bytes(name: str, spec: TensorSpec) -> int:
    """Bytes of one tensor once decoded; a scale is part of its weight."""
    if spec.kind in ENGRAM_KINDS or name == KEPT_AS_STORED:
        return spec.num_bytes
    if name.endswith(".scale"):
        return 0
    return 4 * math.prod(spec.shape) * (2 if spec.dtypes[0] == "I8" else 1)


def plan_memory(model: ModelConfig, config: EngineConfig, machine: Machine) -> MemoryPlan:
    """Decide how weights and tables are held, and how many cache blocks there are.

    Every "auto" goes to the fastest choice that fits; the last choice, if none does (see `MemoryPlan.shortfall`). Tables are
    not taken into memory where they would drive mapped weights out of the page cache.
    """
    specs = expected_tensors(model)
    classes = weight_classes(specs)
    for held_as, engram in _choices(config, machine):
        plan = _plan(model, config, machine, classes, held_as, engram)
        crowds_out = engram == "memory" and config.engram == "auto" and plan.shortfall + plan.mapped_bytes > 0
        if plan.shortfall <= 0 and not crowds_out:
            break
    return plan


def _choices(config: EngineConfig, machine: Machine) -> Iterator[tuple[HeldAs, EngramAt]]:
    """Ways of holding weights and tables that the settings allow, fastest first."""
    weights: tuple[HeldAs, ...] = ("decoded", "packed") if config.weights == "auto" else (config.weights,)
    tables: tuple[EngramAt, ...] = ("memory", "mmap") if config.engram == "auto" else (config.engram,)
    return itertools.product(("packed",) if machine.num_devices else weights, tables)


def _plan(
    model: ModelConfig,
    config: EngineConfig,
    machine: Machine,
    classes: tuple[WeightClass, ...],
    held_as: HeldAs,
    engram: EngramAt,
) -> MemoryPlan:
    text = model.text
    parts = loaded_parts(model, config)
    spec = CacheSpec.of(text, Topology.of(text), with_drafts="draft" in parts)
    on_devices = machine.num_devices > 0
    loaded = [group for group in classes if group.part in parts]
    memory, mapped = _weight_bytes(loaded, held_as, engram, machine.num_devices)
    plan = MemoryPlan(
        machine=machine,
        weights=classes,
        held_as=held_as,
        engram=engram,
        weight_bytes=memory,
        mapped_bytes=mapped,
        working_bytes=_working_bytes(model, config, decodes_per_use=held_as == "packed" and not on_devices),
        bytes_per_token=spec.bytes_per_token(packed=on_devices),
        bytes_per_token_packed=spec.bytes_per_token(packed=True),
        slot_bytes=spec.slot_bytes(packed=on_devices),
        slot_bytes_packed=spec.slot_bytes(packed=True),
        num_slots=config.max_num_seqs,
        num_blocks=0,
        context_limit=min(config.max_model_len or text.max_position_embeddings, text.max_position_embeddings),
    )
    return replace(plan, num_blocks=_num_blocks(plan, config))


def loaded_parts(model: ModelConfig, config: EngineConfig) -> tuple[Part, ...]:
    """The parts of a checkpoint that are loaded."""
    has_drafter = parse_speculation(config.speculation) != "off" and model.text.num_nextn_predict_layers > 0
    return ("text", "draft") if has_drafter else ("text",)


def _weight_bytes(classes: Sequence[WeightClass], held_as: HeldAs, engram: EngramAt, num_devices: int) -> tuple[int, int]:
    """Bytes in memory, and mapped from files."""
    memory = mapped = 0
    for group in classes:
        if group.kind in ENGRAM_KINDS and engram == "mmap":
            mapped += group.stored_bytes
        elif num_devices:
            memory += -(-group.stored_bytes // num_devices) if group.kind in DIVIDED_KINDS else group.stored_bytes
        elif held_as == "decoded" or group.kind in ENGRAM_KINDS | VECTOR_KINDS:
            memory += group.decoded_bytes
        else:
            mapped += group.stored_bytes
    return memory, mapped


def _working_bytes(model: ModelConfig, config: EngineConfig, *, decodes_per_use: bool) -> int:
    text = model.text
    heads_width = text.num_attention_heads * text.head_dim
    floats_per_row = (
        ROW_COPIES * text.hc_mult * text.hidden_size
        + 3 * heads_width
        + text.o_groups * text.o_lora_rank
        + text.index_n_heads * text.index_head_dim
        + (text.num_experts_per_tok + 1) * (text.hidden_size + 3 * text.moe_intermediate_size)
        + (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    )
    logits = config.max_num_seqs * text.vocab_size
    largest = text.vocab_size * text.hidden_size if decodes_per_use else 0
    return SCRATCH_BYTES + 4 * (config.max_num_batched_tokens * floats_per_row + logits + largest)


def _num_blocks(plan: MemoryPlan, config: EngineConfig) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    if config.cache_bytes is not None:
        return config.cache_bytes // plan.block_bytes
    left = max(0, plan.usable_bytes - plan.fixed_bytes)
    # mapped weights want the page cache, but caches get something even where those never fit
    fair = left if plan.machine.num_devices else int(max(left - plan.mapped_bytes, left // 4) * CACHE_SHARE)
    most_useful = config.max_num_seqs * math.ceil(plan.context_limit / BLOCK_TOKENS)
    return min(most_useful, max(fair // plan.block_bytes, min(1, left // plan.block_bytes)))
