"""The noise generator against the published vectors of Philox4x32-10, and its distribution against the closed form."""

from __future__ import annotations

import numpy as np
import pytest

from abyssal.core.noise import gumbel, philox

# Known answers of the Random123 distribution (kat_vectors): counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter, key, expected):
    assert tuple(philox(np.array([counter], np.uint64), key)[0]) == expected


def test_noise_belongs_to_the_id_not_to_its_rank():
    every = gumbel(5, 17, np.arange(1000))
    some = np.array([3, 4, 250, 999])
    assert (gumbel(5, 17, some) == every[some]).all()


@pytest.mark.parametrize("change", [{"seed": 6}, {"position": 18}, {"domain": 1}])
def test_noise_depends_on_seed_position_and_domain(change):
    base = {"seed": 5, "position": 17, "domain": 0}
    ids = np.arange(64)
    a = gumbel(base["seed"], base["position"], ids, base["domain"])
    other = base | change
    b = gumbel(other["seed"], other["position"], ids, other["domain"])
    assert not np.isclose(a, b).any()


def test_noise_is_gumbel_distributed():
    noise = np.sort(np.concatenate([gumbel(9, p, np.arange(5000)) for p in range(20)]))
    expected = np.exp(-np.exp(-noise))
    empirical = np.arange(1, len(noise) + 1) / len(noise)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is the 0.1% level
    assert np.abs(expected - empirical).max() < 1.95 / np.sqrt(len(noise))
    assert np.isfinite(noise).all()
