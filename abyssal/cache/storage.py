"""The tensors behind the cache groups, in float32 as the CPU holds them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .spec import CacheGroup, CacheSpec


class CacheStorage:
    """Memory of all blocks and state slots; the `Caches` that a model's forward reads and writes.

    Memory is reserved at once and touched only where rows are written, so an unused block costs address space, not memory.
    """

    def __init__(
        self, spec: CacheSpec, num_blocks: int, num_slots: int, allocate: Callable[..., torch.Tensor] | None = None
    ) -> None:
        """`allocate` gives float32 zeros of a shape; None for those of the host."""
        self._allocate = allocate or _untouched
        self.spec, self.num_blocks, self.num_slots = spec, num_blocks, num_slots
        self._tensors: dict[str, dict[int, torch.Tensor]] = {
            group.name: {owner: self._reserve(group, owner) for owner in group.owners}
            for group in spec.groups
            if group.allocated
        }
        self._windows = self._tensors["window_kv"] | self._tensors.get("draft_window_kv", {})

    def _reserve(self, group: CacheGroup, owner: int) -> torch.Tensor:
        rows = group.rows_of(owner)
        if group.name in ("window_kv", "draft_window_kv"):
            return self._allocate(self.num_slots, rows, group.row_elements)
        if group.kind == "ring":
            return self._allocate(self.num_slots * rows, 2, group.row_elements // 2)
        return self._allocate(self.num_blocks * rows, group.row_elements)

    def window(self, layer: int) -> torch.Tensor:
        return self._windows[layer]

    def entries(self, layer: int) -> torch.Tensor:
        return self._tensors["compressed_kv"][layer]

    def index_keys(self, layer: int) -> torch.Tensor:
        return self._tensors["index_keys"][layer]

    def partial(self, layer: int) -> torch.Tensor:
        return self._tensors["partial_groups"][layer]

    def fill(self, value: float) -> None:
        """Overwrite everything (tests: what is not written must not be read)."""
        for tensors in self._tensors.values():
            for tensor in tensors.values():
                tensor.fill_(value)


def _untouched(*shape: int) -> torch.Tensor:
    """Zeros that take up memory only once they are written to, which those of torch do at once."""
    return torch.from_numpy(np.zeros(shape, np.float32))
