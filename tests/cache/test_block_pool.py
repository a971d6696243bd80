"""The pools against the plainest possible model of them: a list of free ids and a table of counts."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from abyssal.cache.block_pool import BlockPool, SlotPool


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of operations; `free` is the expected order of hand-out."""

    @initialize(num_blocks=st.integers(0, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.free = list(range(num_blocks))
        self.counts = dict.fromkeys(range(num_blocks), 0)

    @rule(num_blocks=st.integers(0, 13))
    def allocate(self, num_blocks):
        block_ids = self.pool.allocate(num_blocks)
        if num_blocks > len(self.free):
            assert block_ids is None
            return
        assert list(block_ids) == self.free[:num_blocks]
        del self.free[:num_blocks]
        self.counts.update(dict.fromkeys(block_ids, 1))

    @rule(data=st.data())
    def let_go(self, data):
        held = [b for b, count in self.counts.items() if count]
        block_ids = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        self.pool.decref(block_ids)
        for block_id in block_ids:
            self.counts[block_id] -= 1
            if self.counts[block_id] == 0:
                self.free.append(block_id)

    @rule(data=st.data())
    def share_or_take_back(self, data):
        block_ids = data.draw(st.lists(st.sampled_from(list(self.counts)), unique=True)) if self.counts else []
        self.pool.incref(block_ids)
        for block_id in block_ids:
            if self.counts[block_id] == 0:
                self.free.remove(block_id)
            self.counts[block_id] += 1

    @invariant()
    def agrees(self):
        assert self.pool.num_free == len(self.free)
        for block_id, count in self.counts.items():
            assert self.pool.ref_count(block_id) == count
            assert self.pool.is_free(block_id) == (count == 0)


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_shuffled_pool_hands_out_each_block_once_in_an_order_fixed_by_the_seed():
    def order(seed):
        pool = BlockPool(100, shuffle_seed=seed)
        return [block_id for _ in range(10) for block_id in pool.allocate(10)]

    assert sorted(order(1)) == list(range(100))
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != list(range(100))


def test_shuffled_pool_keeps_counts():
    pool = BlockPool(5, shuffle_seed=3)
    block_ids = pool.allocate(5)
    assert pool.allocate(1) is None
    pool.decref(block_ids[:2])
    assert set(pool.allocate(2)) == set(block_ids[:2])
    assert pool.num_free == 0


def test_letting_go_of_a_free_block_is_noticed():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1"):
        pool.decref([1])


@pytest.mark.parametrize("seed", [None, 5])
def test_slots_are_each_held_once(seed):
    pool = SlotPool(4, shuffle_seed=seed)
    slots = [pool.allocate() for _ in range(4)]
    assert sorted(slots) == [0, 1, 2, 3]
    assert pool.allocate() is None
    pool.free(2)
    assert pool.is_free(2)
    assert not pool.is_free(1)
    assert (pool.num_free, pool.allocate(), pool.num_free) == (1, 2, 0)
    pool.free(3)
    with pytest.raises(AssertionError, match="slot 3"):
        pool.free(3)
