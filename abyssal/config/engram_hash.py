"""Constants of the Engram hash, which follow from the configuration alone.

Each Engram layer looks up, for n = 2 .. max_ngram_size, one table row for each head: a product-and-xor hash of the last n
compressed ids, modulo a prime of its own. Primes are not stored in a checkpoint; tables are as long as their sum.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import TextConfig

MULTIPLIER_SEED = 10007


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))


def hash_primes(num_layers: int, max_ngram_size: int, num_heads: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Primes of each layer, ascending n, then head.

    Layers are walked in order; each (layer, n) starts over at `vocab_size` and takes the next primes that are still free.
    """
    taken: set[int] = set()
    layers = []
    for _ in range(num_layers):
        primes: list[int] = []
        for _ in range(max_ngram_size - 1):
            candidate = vocab_size
            for _ in range(num_heads):
                while candidate in taken or not _is_prime(candidate):
                    candidate += 1
                taken.add(candidate)
                primes.append(candidate)
        layers.append(tuple(primes))
    return tuple(layers)


@functools.cache
def engram_primes(config: TextConfig) -> tuple[tuple[int, ...], ...]:
    """Primes of each Engram layer in the order of `engram_layer_ids`: (max_ngram_size - 1) * n_heads numbers each."""
    return hash_primes(
        len(config.engram_layer_ids), config.engram_max_ngram_size, config.engram_n_heads, config.engram_vocab_size
    )


def engram_offsets(config: TextConfig) -> tuple[tuple[int, ...], ...]:
    """First table row of each prime, for each Engram layer: exclusive prefix sums of `engram_primes`."""
    return tuple(tuple(accumulate(primes[:-1], initial=0)) for primes in engram_primes(config))


def engram_multipliers(config: TextConfig, layer_id: int) -> tuple[int, ...]:
    """Odd multipliers of one layer's hash, `max_ngram_size` of them; their products with compressed ids fit in 63 bits."""
    import numpy as np  # here, so that a command line that hashes nothing starts fast

    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    draws = np.random.default_rng(MULTIPLIER_SEED * layer_id).integers(
        0, bound, config.engram_max_ngram_size, dtype=np.int64
    )
    return tuple(2 * int(draw) + 1 for draw in draws)
