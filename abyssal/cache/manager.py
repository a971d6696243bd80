"""Who holds which blocks and which state slot: the only cache class that the scheduler sees.

A request holds a block table, whose entry i stands for tokens `128 * i .. 128 * i + 127`, and one state slot. Both are taken
when it is admitted, the table grows with the sequence, and both are given back together. The manager deals in ids; it never
touches memory. Ids given back may be handed out at once, because steps run in the order in which they were scheduled.
"""

from __future__ import annotations

from collections import Counter

from ..config.engine import BLOCK_TOKENS
from ..core.request import Request
from .block_pool import BlockPool, SlotPool


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold that many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class CacheManager:
    """Block tables and state slots of all requests.

    Args:
        num_blocks: blocks of 128 tokens in the pool.
        num_slots: state slots; one for each request that may run at a time.
        shuffle_seed: hand out ids in a random order (tests).
    """

    def __init__(self, num_blocks: int, num_slots: int, *, shuffle_seed: int | None = None) -> None:
        self._block_pool = BlockPool(num_blocks, shuffle_seed=shuffle_seed)
        self._slot_pool = SlotPool(num_slots, shuffle_seed=shuffle_seed)
        self._tables: dict[str, list[int]] = {}
        self._slots: dict[str, int] = {}

    @property
    def num_blocks(self) -> int:
        return self._block_pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._block_pool.num_free

    @property
    def num_free_slots(self) -> int:
        return self._slot_pool.num_free

    @property
    def capacity_tokens(self) -> int:
        """Tokens of one sequence that had the pool to itself."""
        return self._block_pool.num_blocks * BLOCK_TOKENS

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    def can_admit(self, request: Request, num_tokens: int, *, headroom_blocks: int = 0) -> bool:
        """Whether a request that holds nothing could take a slot and blocks for `num_tokens`. Changes nothing.

        Args:
            headroom_blocks: blocks that must stay free beside them.
        """
        assert request.request_id not in self._tables, f"request {request.request_id} has been admitted already"
        return self.num_free_slots > 0 and num_blocks_for(num_tokens) + headroom_blocks <= self.num_free_blocks

    def allocate(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Lengthen a block table until it holds `num_tokens`.

        Returns:
            The ids appended, often none; None, and nothing changed, if too few blocks are free.
        """
        table = self._tables.get(request_id, ())
        num_missing = num_blocks_for(num_tokens) - len(table)
        if num_missing <= 0:
            return ()
        block_ids = self._block_pool.allocate(num_missing)
        if block_ids is not None:
            self._tables.setdefault(request_id, []).extend(block_ids)
        return block_ids

    def assign_slot(self, request_id: str) -> int:
        """Take a state slot. The caller has asked `can_admit`."""
        assert request_id not in self._slots, f"request {request_id} already holds slot {self._slots[request_id]}"
        slot = self._slot_pool.allocate()
        assert slot is not None, f"request {request_id} was admitted, but all {self._slot_pool.num_slots} slots are held"
        self._slots[request_id] = slot
        return slot

    def free(self, request_id: str) -> None:
        """Give back all that a request holds, if anything. The end of a table is reused before its beginning."""
        self._block_pool.decref(reversed(self._tables.pop(request_id, [])))
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._slot_pool.free(slot)

    def blocks(self, request_id: str) -> tuple[int, ...]:
        """A request's block table (a copy); empty if it holds nothing."""
        return tuple(self._tables.get(request_id, ()))

    def slot(self, request_id: str) -> int | None:
        """A request's state slot, or None."""
        return self._slots.get(request_id)

    def check_integrity(self) -> None:
        """Compare the pools with the tables, in time proportional to both. For tests and for debugging.

        Raises:
            AssertionError: naming the first block or slot that is lost, held twice, or counted wrong.
        """
        holders = Counter(block_id for table in self._tables.values() for block_id in table)
        for block_id in range(self.num_blocks):
            count, is_free = self._block_pool.ref_count(block_id), self._block_pool.is_free(block_id)
            found = holders.pop(block_id, 0)
            assert count == found, f"block {block_id} counts {count} holders, but {found} tables list it"
            assert is_free == (count == 0), f"block {block_id} has {count} holders and is {'' if is_free else 'not '}free"
        assert not holders, f"tables list blocks that do not exist: {sorted(holders)}"
        for request_id, table in self._tables.items():
            assert len(set(table)) == len(table), f"request {request_id} lists a block twice: {table}"
            assert request_id in self._slots, f"request {request_id} holds blocks but no slot"
        self._check_slots()

    def _check_slots(self) -> None:
        holders = Counter(self._slots.values())
        for slot in range(self._slot_pool.num_slots):
            found, is_free = holders.pop(slot, 0), self._slot_pool.is_free(slot)
            assert found == (0 if is_free else 1), f"slot {slot} has {found} holders and is {'' if is_free else 'not '}free"
        assert not holders, f"requests hold slots that do not exist: {sorted(holders)}"
        num_held = self._slot_pool.num_slots - self._slot_pool.num_free
        assert num_held == len(self._slots), f"{num_held} slots are taken, {len(self._slots)} requests hold one"
