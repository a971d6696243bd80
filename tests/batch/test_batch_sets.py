"""The compact sets against Python's."""

import random

from abyssal.batch.sets import DigestSet, LineSet


def test_digest_set_is_a_set() -> None:
    rng = random.Random(0)
    texts, members, digests = [str(rng.randrange(8000)) for _ in range(20_000)], set(), DigestSet()
    for text in texts:
        assert digests.add(text) == (text not in members)
        members.add(text)
    assert len(digests) == len(members)


def test_digest_set_is_small_whatever_the_texts() -> None:
    digests = DigestSet()
    for number in range(50_000):
        digests.add(f"{number:0500}")
    assert digests.num_bytes <= 43 * 50_000


def test_half_of_a_surrogate_pair_is_an_id_too() -> None:
    digests = DigestSet()
    assert digests.add("\ud800")
    assert not digests.add("\ud800")


def test_line_set_is_a_set() -> None:
    rng = random.Random(1)
    members, lines = set(), LineSet()
    assert 5 not in lines
    for _ in range(20_000):
        number = rng.randrange(rng.choice([10, 1000, 100_000]))
        assert (number in lines) == (number in members)
        assert lines.add(number) == (number not in members)
        members.add(number)
    assert len(lines) == len(members)
    assert all(number in lines for number in members)
    assert 10**9 not in lines
