"""Block tables and slots: growth, giving back, admission, and an integrity check that notices each kind of damage."""

import pytest

from abyssal.cache.manager import CacheManager, num_blocks_for
from abyssal.core.request import Request
from abyssal.core.sampling_params import SamplingParams


def request(request_id="r"):
    return Request(request_id, [1], SamplingParams(), seed=0, max_total_tokens=10_000)


def admitted(manager, request_id, num_tokens):
    block_ids = manager.allocate(request_id, num_tokens)
    return block_ids, manager.assign_slot(request_id)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (256, 2), (257, 3)])
def test_blocks_for_tokens(num_tokens, blocks):
    assert num_blocks_for(num_tokens) == blocks


def test_a_table_grows_only_at_block_boundaries():
    manager = CacheManager(num_blocks=4, num_slots=1)
    admitted(manager, "a", 1)
    grown = [manager.allocate("a", num_tokens) for num_tokens in range(2, 300)]
    assert [i + 2 for i, ids in enumerate(grown) if ids] == [129, 257]
    assert manager.blocks("a") == (0, 1, 2)
    assert manager.allocate("a", 100) == ()
    assert (manager.num_free_blocks, manager.usage, manager.capacity_tokens) == (1, 0.75, 512)


def test_allocation_is_all_or_nothing():
    manager = CacheManager(num_blocks=3, num_slots=2)
    admitted(manager, "a", 128)
    assert manager.allocate("b", 3 * 128) is None
    assert manager.allocate("a", 5 * 128) is None
    assert (manager.blocks("a"), manager.blocks("b"), manager.num_free_blocks) == ((0,), (), 2)
    manager.check_integrity()


def test_what_is_given_back_is_handed_out_again_end_first():
    manager = CacheManager(num_blocks=3, num_slots=1)
    assert admitted(manager, "a", 300) == ((0, 1, 2), 0)
    manager.free("a")
    assert (manager.num_free_blocks, manager.num_free_slots, manager.blocks("a"), manager.slot("a")) == (3, 1, (), None)
    manager.free("a")
    assert admitted(manager, "b", 200) == ((2, 1), 0)
    manager.check_integrity()


def test_admission_needs_blocks_headroom_and_a_slot():
    manager = CacheManager(num_blocks=4, num_slots=2)
    assert manager.can_admit(request(), 512)
    assert not manager.can_admit(request(), 513)
    assert manager.can_admit(request(), 384, headroom_blocks=1)
    assert not manager.can_admit(request(), 385, headroom_blocks=1)
    admitted(manager, "a", 1)
    admitted(manager, "b", 1)
    assert manager.num_free_blocks == 2
    assert not manager.can_admit(request(), 1)


def test_a_request_is_admitted_once():
    manager = CacheManager(num_blocks=2, num_slots=2)
    admitted(manager, "a", 1)
    with pytest.raises(AssertionError, match="request a"):
        manager.assign_slot("a")
    with pytest.raises(AssertionError, match="request a"):
        manager.can_admit(request("a"), 1)


def test_empty_pool():
    manager = CacheManager(num_blocks=0, num_slots=1)
    assert (manager.usage, manager.capacity_tokens) == (0.0, 0)
    assert not manager.can_admit(request(), 1)
    manager.check_integrity()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m._tables["a"].pop(), "block 1 counts 1 holders, but 0 tables"),
        (lambda m: m._tables["b"].append(0), "block 0 counts 1 holders, but 2 tables"),
        (lambda m: m._tables["b"].append(99), r"do not exist: \[99\]"),
        (lambda m: m._block_pool._free.popitem(), "block 3 has 0 holders and is not free"),
        (lambda m: m._block_pool.decref([2]), "block 2 counts 0 holders, but 1 tables"),
        (lambda m: (m._block_pool.incref([0]), m._tables["a"].append(0)), "lists a block twice"),
        (lambda m: m._slots.pop("a"), "holds blocks but no slot"),
        (lambda m: m._slots.update(b=0), "slot 0 has 2 holders"),
        (lambda m: m._slots.update(c=7), r"do not exist: \[7\]"),
        (lambda m: m._slot_pool._free.append(1), "1 slots are taken, 2 requests"),
    ],
)
def test_integrity_check_notices(damage, message):
    manager = CacheManager(num_blocks=4, num_slots=2)
    admitted(manager, "a", 200)
    admitted(manager, "b", 100)
    manager.check_integrity()
    damage(manager)
    with pytest.raises(AssertionError, match=message):
        manager.check_integrity()
