"""Every byte that a sequence leaves behind, declared as groups of rows of one fixed size.

A *ring* group lives in a request's state slot: row `position % rows` of each owner layer, overwritten as the sequence
grows. A ring is longer than what is read, by the rows that a rejected draft may have written too many, so that nothing has
to be undone. A *paged* group lives in blocks of 128 tokens: one block id stands for the rows of all owners of all paged
groups over the same tokens.

    group             kind   owners                     rows                          element format, packed
    window_kv         ring   every layer                window + rollback             FP8, one scale byte for 32
    compressed_kv     paged  compressed source layers   128 / ratio a block           FP4, one scale byte for 16
    index_keys        paged  the same                   128 / ratio a block           FP4, one scale byte for 32
    partial_groups    ring   sources with ratio > 1     ratio + rollback              float32 (score and latent)
    draft_window_kv   ring   draft stages               window + rollback             as window_kv

Sizes are given packed (as tiers and transfers hold rows) and unpacked (float32, as the CPU holds them). Padding is the
business of a storage, and is not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config.engine import BLOCK_TOKENS
from ..config.model import TextConfig
from ..config.topology import LayerPlan, Topology
from ..core.errors import ConfigError

FLOAT32_BYTES = 4
SCALE_GROUP = 32
"""Elements that share one scale byte; FP4 rows of compressed KV have one for each half of that."""


@dataclass(frozen=True)
class CacheGroup:
    """Rows of one size and one lifetime.

    Attributes:
        kind: "ring", kept in a request's state slot, or "paged", kept in blocks.
        owners: ids of the layers that hold such rows; draft stages count on from the last layer.
        rows: for each owner, its rows in one slot (ring) or in one block (paged).
        row_elements: values in one row.
        packed_row_bytes: bytes of one row in its packed format, scales included.
        recovery: "restored" from a copy where a sequence resumes, or "rebuilt" if the copy may be left out.
        allocated: False for rows that are declared but that no storage holds yet.
    """

    name: str
    kind: Literal["ring", "paged"]
    owners: tuple[int, ...]
    rows: tuple[int, ...]
    row_elements: int
    packed_row_bytes: int
    recovery: Literal["restored", "rebuilt"] = "restored"
    allocated: bool = True

    @property
    def unpacked_row_bytes(self) -> int:
        """Bytes of one row as float32."""
        return self.row_elements * FLOAT32_BYTES

    def rows_of(self, layer_id: int) -> int:
        """Rows of one owner in a slot (ring) or in a block (paged)."""
        return self.rows[self.owners.index(layer_id)]

    def tokens_per_row(self, layer_id: int) -> int:
        """How many tokens one row of a paged group stands for."""
        assert self.kind == "paged", f"rows of {self.name} are not spread over blocks"
        return BLOCK_TOKENS // self.rows_of(layer_id)

    def num_bytes(self, *, packed: bool) -> int:
        """Bytes of all owners' rows in one slot (ring) or in one block (paged)."""
        return sum(self.rows) * (self.packed_row_bytes if packed else self.unpacked_row_bytes)


@dataclass(frozen=True)
class CacheSpec:
    """All groups of a model, in the order in which a block or a slot lists them."""

    groups: tuple[CacheGroup, ...]

    @classmethod
    def of(
        cls, config: TextConfig, topology: Topology, rollback_rows: int | None = None, *, with_drafts: bool = False
    ) -> CacheSpec:
        """Declare the groups of a model.

        Args:
            rollback_rows: ring rows beyond the window; None for one more than a draft has tokens.
            with_drafts: storage holds the draft stages' window too.

        Raises:
            ConfigError: if a row cannot be cut into whole scale groups, or a block into whole compressed entries.
        """
        _check(config, topology)
        rollback = config.dspark_block_size + 1 if rollback_rows is None else rollback_rows
        window = config.sliding_window + rollback
        layers = tuple(plan.layer_id for plan in topology.layers)
        stages = tuple(range(len(layers), len(layers) + config.num_nextn_predict_layers))
        groups = (
            _window_group("window_kv", layers, window, config.head_dim),
            *_compressed_groups(topology.compressed_sources, config.head_dim, config.index_head_dim),
            _partial_group(topology, config.head_dim, rollback),
            _window_group("draft_window_kv", stages, window, config.head_dim, recovery="rebuilt", allocated=with_drafts),
        )
        return cls(tuple(group for group in groups if group.owners))

    def group(self, name: str) -> CacheGroup:
        """The group of that name; KeyError if the model has none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    def block_bytes(self, *, packed: bool) -> int:
        """Bytes of one block of 128 tokens over all paged groups."""
        return self._num_bytes("paged", packed)

    def slot_bytes(self, *, packed: bool) -> int:
        """Bytes of one state slot over all ring groups that are allocated."""
        return self._num_bytes("ring", packed)

    def bytes_per_token(self, *, packed: bool) -> float:
        """Bytes by which the caches grow with each token of context."""
        return self.block_bytes(packed=packed) / BLOCK_TOKENS

    def _num_bytes(self, kind: str, packed: bool) -> int:
        return sum(g.num_bytes(packed=packed) for g in self.groups if g.kind == kind and g.allocated)


def _window_group(
    name: str,
    owners: tuple[int, ...],
    rows: int,
    head_dim: int,
    recovery: Literal["restored", "rebuilt"] = "restored",
    allocated: bool = True,
) -> CacheGroup:
    packed = head_dim + head_dim // SCALE_GROUP
    return CacheGroup(name, "ring", owners, (rows,) * len(owners), head_dim, packed, recovery, allocated)


def _compressed_groups(sources: tuple[LayerPlan, ...], head_dim: int, index_dim: int) -> tuple[CacheGroup, CacheGroup]:
    owners = tuple(plan.layer_id for plan in sources)
    rows = tuple(BLOCK_TOKENS // plan.ratio for plan in sources)
    return (
        CacheGroup("compressed_kv", "paged", owners, rows, head_dim, head_dim // 2 + 2 * (head_dim // SCALE_GROUP)),
        CacheGroup("index_keys", "paged", owners, rows, index_dim, index_dim // 2 + index_dim // SCALE_GROUP),
    )


def _partial_group(topology: Topology, head_dim: int, rollback: int) -> CacheGroup:
    plans = [plan for plan in topology.layers if plan.owns_partial_group]
    owners = tuple(plan.layer_id for plan in plans)
    rows = tuple(plan.ratio + rollback for plan in plans)
    return CacheGroup("partial_groups", "ring", owners, rows, 2 * head_dim, 2 * head_dim * FLOAT32_BYTES)


def _check(config: TextConfig, topology: Topology) -> None:
    for name, value in (("head_dim", config.head_dim), ("index_head_dim", config.index_head_dim)):
        if value % SCALE_GROUP:
            raise ConfigError(f"{name}={value}: must be a multiple of {SCALE_GROUP}, the elements of one cache scale")
    for ratio in topology.ratios:
        if BLOCK_TOKENS % ratio:
            raise ConfigError(f"compress ratio {ratio}: must divide a cache block of {BLOCK_TOKENS} tokens")
