"""Which block ids and state slots are free. Pure counting: what a block holds is not known here.

A block may be shared, so it carries a reference count and becomes free when the last holder lets go. Free blocks form a
queue: the one that has been free longest is handed out first, so that what the others still hold stays available as long as
possible. A free block can be taken back by its id (`incref`), in constant time.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Block ids `0 .. num_blocks - 1` with reference counts.

    Args:
        shuffle_seed: hand out free blocks in a random order that this seed fixes. For tests: results may not depend on ids.
    """

    def __init__(self, num_blocks: int, *, shuffle_seed: int | None = None) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._ref_counts = [0] * num_blocks
        self._random = None if shuffle_seed is None else random.Random(shuffle_seed)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many holders a block has."""
        return self._ref_counts[block_id]

    def is_free(self, block_id: int) -> bool:
        """Whether a block is in the queue of free ones."""
        return block_id in self._free

    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        """Take that many free blocks, each with one holder; None, and nothing taken, if there are not enough."""
        if num_blocks > len(self._free):
            return None
        if self._random is None:
            block_ids = tuple(self._free.popitem(last=False)[0] for _ in range(num_blocks))
        else:
            block_ids = tuple(self._random.sample(tuple(self._free), num_blocks))
            for block_id in block_ids:
                del self._free[block_id]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def incref(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each block; a free one leaves the queue with what it holds."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def decref(self, block_ids: Iterable[int]) -> None:
        """Take a holder from each block. Those left without one become free: the first of them is handed out first."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is let go but has no holder"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None


class SlotPool:
    """State slots `0 .. num_slots - 1`, each with one holder or none. The slot let go last is handed out first."""

    def __init__(self, num_slots: int, *, shuffle_seed: int | None = None) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._is_free = [True] * num_slots
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, slot: int) -> bool:
        """Whether nobody holds a slot."""
        return self._is_free[slot]

    def allocate(self) -> int | None:
        """Take a slot, or None if all are held."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._is_free[slot] = False
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        assert not self._is_free[slot], f"state slot {slot} is let go but nobody holds it"
        self._is_free[slot] = True
        self._free.append(slot)
