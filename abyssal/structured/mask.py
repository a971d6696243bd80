"""Token masks: int32 words, bit `v & 31` of word `v >> 5` is 1 where token v is allowed. One row for each row of logits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.int32]
"""int32 [words] or [rows, words]."""
Rows = npt.NDArray[np.int64]
"""Indices of rows."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CEILINGS: npt.NDArray[np.float32] = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)
"""float32 [256, 8]: for each byte of a mask, what the logits of its eight tokens are at most."""


def num_words(vocab_size: int) -> int:
    """Words of one row."""
    return (vocab_size + 31) // 32


def allocate(num_rows: int, vocab_size: int) -> Mask:
    """int32 [rows, words] in which everything is allowed, bits past the vocabulary included."""
    return np.full((num_rows, num_words(vocab_size)), -1, dtype=np.int32)


def mask_of(allowed: Iterable[int], vocab_size: int) -> Mask:
    """int32 [words] that allows exactly these ids."""
    bits = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_ids(row: Mask, vocab_size: int) -> npt.NDArray[np.int64]:
    """Ids that a row allows, ascending."""
    return np.flatnonzero(unpack(row[None], vocab_size)[0])


def is_allowed(row: Mask, token_id: int) -> bool:
    """Whether a row allows one id."""
    return bool((int(row[token_id >> 5]) >> (token_id & 31)) & 1)


def set_one(row: Mask, token_id: int, value: bool) -> None:
    """Allow or forbid one id in a row, in place."""
    word, bit = int(row[token_id >> 5]) & 0xFFFFFFFF, 1 << (token_id & 31)
    word = word | bit if value else word & ~bit
    row[token_id >> 5] = word - (1 << 32) if word >> 31 else word


def set_bit(masks: Mask, rows: Rows, token_id: int, value: npt.NDArray[np.bool_]) -> None:
    """Allow or forbid one id in some rows of [rows, words], in place; `value` is bool [len(rows)]."""
    words = masks[rows, token_id >> 5].view(np.uint32)
    bit = np.uint32(1 << (token_id & 31))
    masks[rows, token_id >> 5] = np.where(value, words | bit, words & ~bit).view(np.int32)


def get_bit(masks: Mask, rows: Rows, token_id: int) -> npt.NDArray[np.bool_]:
    """bool [len(rows)]: whether each of these rows allows one id."""
    bits: npt.NDArray[np.bool_] = ((masks[rows, token_id >> 5] >> (token_id & 31)) & 1).astype(np.bool_)
    return bits


def unpack(rows: Mask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """bool [rows, vocab_size]."""
    return np.unpackbits(rows.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def apply_mask(logits: npt.NDArray[np.float32], mask: Mask) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: float32 [rows, vocab]; may be wider than the mask, and what lies past it is forbidden.
        mask: int32 [rows, words].
    """
    assert logits.ndim == mask.ndim == 2, f"logits {logits.shape} and mask {mask.shape} must have two dimensions"
    covered = min(logits.shape[1], mask.shape[1] * 32)
    ceiling = np.empty((mask.shape[1] * 4, 8), dtype=np.float32)
    for row, words in zip(logits, mask, strict=True):  # one row at a time: its ceiling stays in the cache
        np.take(_CEILINGS, words.view(np.uint8), axis=0, out=ceiling)
        np.minimum(row[:covered], ceiling.reshape(-1)[:covered], out=row[:covered])
        row[covered:] = -np.inf
