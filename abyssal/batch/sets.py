"""Sets that stay small with millions of members: ids by digest, line numbers by bit."""

from __future__ import annotations

import hashlib

DIGEST_BYTES = 16
"""Two different ids out of 10^9 share a digest of this size with probability 10^-21."""

_EMPTY = bytes(DIGEST_BYTES)
_FIRST_SLOTS = 1024


class DigestSet:
    """A set of texts of which only a digest is kept: 21 to 43 bytes each in one flat table, whatever their length."""

    def __init__(self) -> None:
        self._count = 0
        self._num_slots = _FIRST_SLOTS
        self._table = bytearray(_FIRST_SLOTS * DIGEST_BYTES)

    def __len__(self) -> int:
        return self._count

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return len(self._table)

    def add(self, text: str) -> bool:
        """Take a text in; False if it was there already."""
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
        start = self._find(digest)
        if self._table[start : start + DIGEST_BYTES] == digest:
            return False
        self._table[start : start + DIGEST_BYTES] = digest
        self._count += 1
        if 4 * self._count > 3 * self._num_slots:
            self._grow()
        return True

    def _find(self, digest: bytes) -> int:
        """Where a digest lies in the table, or the empty place where it belongs."""
        slot = int.from_bytes(digest[:8], "little") % self._num_slots
        while True:
            start = slot * DIGEST_BYTES
            found = self._table[start : start + DIGEST_BYTES]
            if found in (digest, _EMPTY):
                return start
            slot = (slot + 1) % self._num_slots

    def _grow(self) -> None:
        old = self._table
        self._num_slots *= 2
        self._table = bytearray(self._num_slots * DIGEST_BYTES)
        for start in range(0, len(old), DIGEST_BYTES):
            digest = bytes(old[start : start + DIGEST_BYTES])
            if digest != _EMPTY:
                place = self._find(digest)
                self._table[place : place + DIGEST_BYTES] = digest


class LineSet:
    """A set of line numbers, one bit for each line up to the greatest."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def add(self, number: int) -> bool:
        """Take a number >= 0 in; False if it was there already."""
        if number in self:
            return False
        byte = number >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits))))
        self._bits[byte] |= 1 << (number & 7)
        self._count += 1
        return True
