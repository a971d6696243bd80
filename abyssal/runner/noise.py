"""Counter-based noise: a hash of (seed, position, vocabulary id), the same whatever runs beside it.

Philox4x32-10 (Salmon et al., SC 2011) with the key from the seed and the counter (vocabulary id // 4, position, domain, 0);
word id % 4 of a block belongs to that id. Keyed by id, not by rank, so that filtering never shifts it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
ROUNDS = 10

FRESH = 0
"""Domain of the noise that draws tokens. Other uses take other numbers."""


def philox(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Blocks of four 32-bit words: counter uint64 [N, 4] of values below 2^32, key of two such -> uint64 [N, 4]."""
    c0, c1, c2, c3 = (counter[:, i] for i in range(4))
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), 1)


def gumbel(seed: int, position: int, ids: npt.NDArray[np.int64], domain: int = FRESH) -> npt.NDArray[np.float64]:
    """Gumbel noise of vocabulary ids [N] at a position, float64 [N].

    The uniform is (word + 1/2) / 2^32, open at both ends, so that the noise is always finite.
    """
    blocks, place = np.unique(ids >> 2, return_inverse=True)
    counter = np.empty((len(blocks), 4), np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 2], counter[:, 3] = blocks.astype(np.uint64), position, domain, 0
    words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    uniform = (words[place, ids & 3].astype(np.float64) + 0.5) / 2.0**32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
