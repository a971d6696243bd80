"""Counter-based noise: a hash of (seed, position, vocabulary id), the same whatever runs beside it.

Philox4x32-10 (Salmon et al., SC 2011) with the key from the seed and the counter (vocabulary id // 4, position, domain, 0);
word id % 4 of a block belongs to that id. Keyed by id, not by rank, so that filtering never shifts it.

The words become Gumbel noise by additions, multiplications and divisions of float64 in a fixed order, without fused
multiply-adds and without a mathematics library: any implementation that keeps to `log` below has the same bits.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
ROUNDS = 10

FRESH = 0
"""Domain of the noise that draws tokens. Other uses take other numbers."""

LOG_TERMS = 11
"""Terms of the series of `log`; with them its error is below 3 units in the last place."""

_LN2, _SQRT2 = math.log(2.0), math.sqrt(2.0)
_COEFFICIENTS = [1.0 / (2 * term + 1) for term in reversed(range(LOG_TERMS))]
_EXPONENT_AT = np.uint64(52)
_MANTISSA = np.uint64((1 << 52) - 1)
_ONE = np.uint64(0x3FF << 52)


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


def log(x: Doubles) -> Doubles:
    """Natural logarithm of positive normal float64 [N].

    x = m 2^e with m in (2^-0.5, 2^0.5]; with s = (m - 1) / (m + 1) it is e ln 2 + 2 s (1 + s^2/3 + s^4/5 + ...), the series
    evaluated from its last term.
    """
    bits = x.view(np.uint64)
    exponent = (bits >> _EXPONENT_AT).astype(np.float64)
    m = ((bits & _MANTISSA) | _ONE).view(np.float64)
    is_large = m > _SQRT2
    m[is_large] *= 0.5
    exponent += is_large
    exponent -= 1023.0
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = np.full_like(s, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        series *= square
        series += coefficient
    s *= 2.0
    s *= series
    exponent *= _LN2
    exponent += s
    return exponent


def gumbel_of(words: npt.NDArray[np.uint64]) -> Doubles:
    """Gumbel noise of 32-bit words [N]: -log(-log((word + 1/2) / 2^32)). The uniform is open at both ends: always finite."""
    return -log(-log((words.astype(np.float64) + 0.5) / 2.0**32))


def gumbel(seed: int, position: int, ids: npt.NDArray[np.int64], domain: int = FRESH) -> Doubles:
    """Gumbel noise of vocabulary ids [N] at a position, float64 [N]."""
    blocks, place = np.unique(ids >> 2, return_inverse=True)
    counter = np.empty((len(blocks), 4), np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 2], counter[:, 3] = blocks.astype(np.uint64), position, domain, 0
    words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return gumbel_of(words[place, ids & 3])
