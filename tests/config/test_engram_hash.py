"""Constants of the Engram hash against values computed elsewhere from the published rule."""

from __future__ import annotations

from abyssal.config.engram_hash import engram_multipliers, engram_offsets, engram_primes, hash_primes
from abyssal.config.released import released_config

MILLION16 = 16_000_000
LAYER_1 = [
    57,
    79,
    81,
    97,
    121,
    129,
    133,
    183,
    189,
    207,
    211,
    253,
    277,
    289,
    307,
    321,
    339,
    381,
    393,
    399,
    403,
    409,
    447,
    463,
]
LAYER_14 = [
    477,
    487,
    499,
    507,
    511,
    573,
    609,
    627,
    667,
    669,
    693,
    697,
    711,
    729,
    759,
    769,
    781,
    799,
    813,
    819,
    841,
    877,
    879,
    889,
]


def test_primes_of_the_released_model() -> None:
    first, second = engram_primes(released_config().text)
    assert list(first) == [MILLION16 + n for n in LAYER_1]
    assert list(second) == [MILLION16 + n for n in LAYER_14]
    assert (sum(first), sum(second)) == (384006168, 384016682)


def test_offsets_are_exclusive_sums() -> None:
    first, second = engram_offsets(released_config().text)
    assert first[:3] == (0, 16000057, 16000057 + 16000079)
    assert second[-1] == 384016682 - 16000889


def test_multipliers_of_the_released_model() -> None:
    config = released_config().text
    assert engram_multipliers(config, 1) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert engram_multipliers(config, 14) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)


def test_small_primes_by_hand() -> None:
    # each n starts over at 2 and skips what was taken before it
    assert hash_primes(2, 3, 2, 2) == ((2, 3, 5, 7), (11, 13, 17, 19))
    assert hash_primes(1, 2, 3, 90) == ((97, 101, 103),)
