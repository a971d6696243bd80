import numpy as np
import pytest

from abyssal.structured.mask import (
    allocate,
    allowed_ids,
    apply_mask,
    get_bit,
    is_allowed,
    mask_of,
    num_words,
    set_bit,
    set_one,
)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 640])
def test_masks_hold_the_ids_they_were_made_of(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    ids = set(np.flatnonzero(rng.random(vocab_size) < 0.3).tolist()) | {vocab_size - 1}
    row = mask_of(ids, vocab_size)
    assert row.shape == (num_words(vocab_size),)
    assert set(allowed_ids(row, vocab_size).tolist()) == ids
    assert [is_allowed(row, i) for i in range(vocab_size)] == [i in ids for i in range(vocab_size)]
    # The layout itself, written out: bit v & 31 of word v >> 5.
    assert all((int(row[i >> 5]) >> (i & 31)) & 1 == (i in ids) for i in range(vocab_size))


def test_setting_one_bit_leaves_the_others() -> None:
    rng = np.random.default_rng(0)
    masks = rng.integers(-(2**31), 2**31, (5, 4), dtype=np.int64).astype(np.int32)
    for token_id in (0, 31, 32, 63, 127):
        before = masks.copy()
        rows, values = np.array([1, 3, 4]), np.array([True, False, True])
        set_bit(masks, rows, token_id, values)
        assert get_bit(masks, rows, token_id).tolist() == values.tolist()
        for row, value in zip(rows, values, strict=True):
            set_one(before[row], token_id, bool(value))
        np.testing.assert_array_equal(masks, before)


@pytest.mark.parametrize("vocab_size", [5, 64, 100])
def test_apply_forbids_exactly_the_others(vocab_size: int) -> None:
    rng = np.random.default_rng(1)
    masks = rng.integers(-(2**31), 2**31, (3, num_words(vocab_size)), dtype=np.int64).astype(np.int32)
    logits = rng.standard_normal((3, vocab_size)).astype(np.float32)
    expected = logits.copy()
    for row in range(3):
        for i in range(vocab_size):
            if not (int(masks[row, i >> 5]) >> (i & 31)) & 1:
                expected[row, i] = -np.inf
    apply_mask(logits, masks)
    np.testing.assert_array_equal(logits, expected)


def test_apply_forbids_logits_past_the_mask() -> None:
    logits = np.zeros((1, 70), dtype=np.float32)
    apply_mask(logits, allocate(1, 64))
    assert np.isneginf(logits[0, 64:]).all()
    assert (logits[0, :64] == 0).all()
