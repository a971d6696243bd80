"""Matchers in the slots of a runner: what comes back from a preemption, and what runs ahead for drafts."""

from __future__ import annotations

import numpy as np
import pytest

from abyssal.config.model import ModelConfig
from abyssal.runner.constraints import Constraints
from abyssal.structured.compiler import GrammarCompiler
from abyssal.structured.mask import allowed_ids
from abyssal.structured.spec import StructuredOutput
from abyssal.structured.vocabulary import Vocabulary
from abyssal.text.tokenizer import Tokenizer, eos_token_ids


@pytest.fixture(scope="module")
def vocabulary(checkpoint_of) -> Vocabulary:
    folder = checkpoint_of("micro")
    config = ModelConfig.load(folder)
    return Vocabulary.of(Tokenizer.from_folder(folder, config), config.text.vocab_size, eos_token_ids(folder, config))


@pytest.fixture(scope="module")
def compiler(vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary)


@pytest.fixture
def matcher_of(compiler):
    return lambda **spec: compiler.compile(StructuredOutput(**spec)).matcher()


def ids_of(vocabulary: Vocabulary, text: str) -> list[int]:
    """One token for each character."""
    by_bytes = {vocabulary.tokenizer.token_bytes(i): i for i in vocabulary.text_ids}
    return [by_bytes[c.encode()] for c in text]


def allowed(vocabulary: Vocabulary, mask) -> set[int]:
    return set(allowed_ids(mask, vocabulary.size).tolist())


def test_masks_of_a_step(vocabulary, matcher_of) -> None:
    a, b, c, z = ids_of(vocabulary, "abcz")
    constraints = Constraints(vocabulary.size)
    constraints.assign(3, matcher_of(regex="ab*c"), 0)
    constraints.assign(5, None, 0)
    constraints.begin([(5, (1, 2)), (3, (a, b, z, c))])
    assert constraints.masks_of(5) is None
    masks = constraints.masks_of(3)
    assert masks.shape == (5, -(-vocabulary.size // 32))
    assert a in allowed(vocabulary, masks[0])
    assert not {b, c, z} & allowed(vocabulary, masks[0])
    assert {b, c} <= allowed(vocabulary, masks[1])
    assert {b, c} <= allowed(vocabulary, masks[2])
    assert z not in allowed(vocabulary, masks[2])
    assert constraints.accept(3, [a, b, c]) is None
    assert constraints.accept(5, [z]) is None


def test_a_token_that_is_not_allowed_is_told(vocabulary, matcher_of) -> None:
    a, z = ids_of(vocabulary, "az")
    constraints = Constraints(vocabulary.size)
    constraints.assign(0, matcher_of(regex="ab*c"), 0)
    assert f"token {z} was drawn" in constraints.accept(0, [a, z])


def test_tokens_behind_the_end_are_nobodys(vocabulary, matcher_of) -> None:
    """Case 24: more tokens behind EOS, in the same step and in the next ones."""
    (a,) = ids_of(vocabulary, "a")
    eos = min(vocabulary.eos_ids)
    constraints = Constraints(vocabulary.size)
    constraints.assign(0, matcher_of(regex="a"), 0)
    assert constraints.accept(0, [a, eos, a, a]) is None
    assert constraints.accept(0, [eos]) is None
    constraints.begin([(0, (a, a))])
    assert allowed(vocabulary, constraints.masks_of(0)[0]) == vocabulary.eos_ids


def test_results_that_were_dropped_are_taken_back(vocabulary, matcher_of) -> None:
    """A request is preempted before the last step's tokens were taken: it comes back with fewer than its matcher has."""
    a, b, c = ids_of(vocabulary, "abc")
    matcher, constraints = matcher_of(regex="abc"), Constraints(vocabulary.size)
    constraints.assign(0, matcher, 0)
    constraints.accept(0, [a])
    constraints.accept(0, [b, c])
    constraints.assign(1, matcher, 1)
    constraints.begin([(1, ())])
    assert b in allowed(vocabulary, constraints.masks_of(1)[0])
    assert c not in allowed(vocabulary, constraints.masks_of(1)[0])
    constraints.assign(1, None, 0)
    constraints.begin([(1, ())])
    assert constraints.masks_of(1) is None


def test_a_walk_ahead_leaves_no_trace(vocabulary, matcher_of) -> None:
    a, b, c, z = ids_of(vocabulary, "abcz")
    matcher, free, constraints = matcher_of(regex="ab{2}[ac]z"), matcher_of(regex="z*"), Constraints(vocabulary.size)
    constraints.assign(0, matcher, 0)
    constraints.assign(2, free, 0)
    assert constraints.walk([1]) is None
    walk = constraints.walk([0, 1, 2])
    seen = []
    for own in (a, b, b, c, z):
        masks = walk.masks()
        assert masks[1] is None
        seen.append(own in allowed(vocabulary, masks[0]))
        walk.advance([own, 7, z])
    assert all(seen)
    assert walk.certain[1] == [False] * 5
    assert walk.certain[2] == [False] * 5
    assert walk.certain[0][-2:] == [False, True]
    walk.close()
    assert matcher.num_tokens == free.num_tokens == 0
    constraints.begin([(0, ())])
    assert a in allowed(vocabulary, constraints.masks_of(0)[0])


def test_a_draft_that_is_not_allowed_ends_the_walk(vocabulary, matcher_of) -> None:
    a, z = ids_of(vocabulary, "az")
    matcher, constraints = matcher_of(regex="aaa"), Constraints(vocabulary.size)
    constraints.assign(0, matcher, 0)
    walk = constraints.walk([0])
    assert walk.masks()[0] is not None
    walk.advance([a])
    assert walk.masks()[0] is not None
    walk.advance([z])
    assert walk.masks() == [None]
    walk.advance([a])
    walk.close()
    assert matcher.num_tokens == 0


@pytest.mark.parametrize("token_id", [0, 5, 31, 63])
def test_one_bit_is_certain(token_id) -> None:
    from abyssal.runner.constraints import _allows_one

    mask = np.zeros(3, np.uint32)
    assert not _allows_one(mask.view(np.int32))
    mask[token_id >> 5] = np.uint32(1 << (token_id & 31))
    assert _allows_one(mask.view(np.int32))
    mask[2] = 4
    assert not _allows_one(mask.view(np.int32))
