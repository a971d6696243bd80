"""Matchers step by step, back again, forked, and through drafts: all ways lead to the same masks."""

import random

import numpy as np
import pytest

from abyssal.structured.grammar import GrammarError
from abyssal.structured.mask import allocate, allowed_ids
from abyssal.structured.matcher import Matcher, fill_many
from abyssal.structured.rules import Phase

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "array", "items": {"type": "string", "maxLength": 5}},
        "c": {"enum": ["x", "yy"]},
    },
    "required": ["a", "b"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}},
    }
]
SPECS = {
    "json": {"json": SCHEMA},
    "compact": {"json": SCHEMA, "max_whitespace": 0},
    "regex": {"regex": "(ab|c+)*d{1,3}"},
    "recursive": {"grammar": 'root ::= "(" root ")" | [a-z]*'},
    "auto": {"tools": TOOLS},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "thinking": {"json": SCHEMA, "thinking": True},
    "thinking and tools": {"tools": TOOLS, "thinking": True},
}


def walk(kit, corpus, matcher: Matcher, seed: int, steps: int) -> list[tuple[int, set[int]]]:
    """Random legal tokens with the masks they were drawn from; markup that ends a phase is drawn often."""
    rng, path = random.Random(seed), []
    interesting = {kit.vocabulary.think_end_id, kit.vocabulary.dsml_id}
    for _ in range(steps if matcher.phase is not Phase.DONE else 0):
        allowed = kit.mask(matcher)
        pick = sorted(allowed & interesting) if rng.random() < 0.4 else []
        if matcher.phase is Phase.TEXT and rng.random() < 0.3:
            pick = [i for i in kit.ids("\n\n<") if i in allowed][:1]
        token_id = rng.choice(pick or sorted(allowed - kit.vocabulary.eos_ids) or sorted(allowed))
        assert matcher.accept(token_id)
        path.append((token_id, allowed))
        if matcher.phase is Phase.DONE:
            break
    return path


@pytest.mark.parametrize("name", SPECS)
def test_rollback_and_fork_restore_the_masks(kit, corpus, name: str) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        matcher = kit.matcher(**SPECS[name])
        path = walk(kit, corpus, matcher, seed, 30)
        assert matcher.num_tokens == len(path)
        for _ in range(5):
            back = rng.randrange(len(path) + 1)
            twin = matcher.fork()
            twin.rollback(back)
            for token_id, allowed in path[len(path) - back :]:
                assert kit.mask(twin) == allowed
                assert twin.accept(token_id)
            assert kit.mask(twin) == kit.mask(matcher)
        matcher.rollback(len(path))
        assert kit.mask(matcher) == (path[0][1] if path else kit.mask(matcher))


@pytest.mark.parametrize("name", SPECS)
def test_drafts_filled_at_once_equal_single_steps(kit, corpus, name: str) -> None:
    """Rows of many sequences, with legal and illegal drafts, against one fill after each accept."""
    rng = random.Random(5)
    jobs, expected, first = [], [], 0
    for seed in range(24):
        matcher = kit.matcher(**SPECS[name])
        walk(kit, corpus, matcher, seed, rng.randrange(12))
        drafts = [token_id for token_id, _ in walk(kit, corpus, matcher.fork(), 100 + seed, rng.randrange(7))]
        if drafts and rng.random() < 0.5:
            drafts[rng.randrange(len(drafts))] = rng.randrange(kit.vocabulary.size)
        reference, rows = matcher.fork(), []
        for token_id in [*drafts, None]:
            rows.append(kit.mask(reference))
            if token_id not in rows[-1] or reference.phase is Phase.DONE:
                break
            assert reference.accept(token_id)
        jobs.append((matcher, first, drafts))
        expected.append(rows)
        first += len(drafts) + 1
    masks = allocate(first, kit.vocabulary.size)
    before = [(matcher.num_tokens, matcher.phase) for matcher, _, _ in jobs]
    for _ in range(2):  # the matchers stay as they are, so a second time gives the same
        results = fill_many(jobs, masks)
        assert [(matcher.num_tokens, matcher.phase) for matcher, _, _ in jobs] == before
        for (_, row, _), result, rows in zip(jobs, results, expected, strict=True):
            assert result.error is None
            assert result.num_legal == len(rows) - 1
            assert [set(allowed_ids(masks[row + i], kit.vocabulary.size).tolist()) for i in range(len(rows))] == rows


def test_drafts_behind_a_stop_id_are_illegal(kit) -> None:
    a, b = kit.byte_ids("ab")
    first, second = sorted(kit.vocabulary.eos_ids)
    masks = allocate(10, kit.vocabulary.size)
    jobs = [(kit.matcher(regex="ab*"), 0, [a, first, b, second]), (kit.matcher(regex="ab*"), 5, [a, b, b, second])]
    assert [r.num_legal for r in fill_many(jobs, masks)] == [2, 4]
    rows = [set(allowed_ids(row, kit.vocabulary.size).tolist()) for row in masks]
    assert rows[2] == rows[9] == kit.vocabulary.eos_ids
    assert {b, first, second} <= rows[1]
    assert {b, first, second} <= rows[8]


@pytest.mark.parametrize("name", SPECS)
def test_forced_tokens_are_the_only_ones_allowed(kit, corpus, name: str) -> None:
    num_forced = 0
    for seed in range(10):
        matcher = kit.matcher(**SPECS[name])
        for _ in range(25):
            forced = matcher.forced_tokens()
            probe = matcher.fork()
            for token_id in forced:
                assert kit.mask(probe) == {token_id}
                assert probe.accept(token_id)
            num_forced += len(forced)
            if not walk(kit, corpus, matcher, seed, 1) or matcher.phase is Phase.DONE:
                break
    assert num_forced > 0 or name not in ("json", "compact", "required")


def test_forced_tokens_of_compact_json_spell_the_first_name(kit) -> None:
    matcher = kit.matcher(
        json={"type": "object", "properties": {"temperature": {"type": "integer"}}, "required": ["temperature"]},
        max_whitespace=0,
    )
    assert '{"temperature":'.startswith(kit.text(matcher.forced_tokens()))
    assert len(kit.text(matcher.forced_tokens())) > 8


def test_a_refused_token_changes_nothing(kit) -> None:
    matcher = kit.matcher(json=SCHEMA)
    ids = kit.byte_ids('{"a"')
    assert kit.feed(matcher, ids) == len(ids)
    before = kit.mask(matcher)
    for token_id in (kit.byte_ids("}")[0], kit.vocabulary.dsml_id, 1, kit.vocabulary.size - 1, kit.vocabulary.size + 5, -1):
        assert not matcher.accept(token_id)
    assert kit.mask(matcher) == before
    assert matcher.num_tokens == len(ids)


def test_states_of_an_answer(kit) -> None:
    matcher = kit.matcher(regex="ab?")
    assert (matcher.is_accepting, matcher.is_finished) == (False, False)
    matcher.accept(kit.byte_ids("a")[0])
    assert (matcher.is_accepting, matcher.is_finished) == (True, False)
    matcher.accept(kit.byte_ids("b")[0])
    assert (matcher.is_accepting, matcher.is_finished) == (True, True)
    assert kit.mask(matcher) == kit.vocabulary.eos_ids
    assert matcher.accept(min(kit.vocabulary.eos_ids))
    assert (matcher.phase, matcher.is_finished) == (Phase.DONE, True)
    matcher.rollback(2)
    assert (matcher.is_accepting, matcher.is_finished) == (True, False)


def test_several_stop_ids(kit) -> None:
    """EOS ids and the request's own: allowed where the answer is complete, and only there, even if they stand for text."""
    brace, letter = kit.byte_ids("}a")
    for stop_ids in ((), (2,), (brace,), (letter, 2)):
        matcher = kit.matcher(stop_ids=stop_ids, json={"type": "object", "additionalProperties": {"type": "integer"}})
        stops = set(stop_ids) | kit.vocabulary.eos_ids
        assert not stops & kit.mask(matcher)
        whole = kit.ids("{}")  # one token, so that a forbidden brace does not matter
        assert len(whole) == 1 or brace not in stop_ids
        assert kit.feed(matcher, whole) == len(whole)
        assert kit.mask(matcher) == stops
        assert matcher.accept(max(stops))
        assert matcher.is_finished


def test_a_stop_id_that_the_grammar_needs_is_an_error_and_not_an_empty_mask(kit) -> None:
    a = kit.byte_ids("a")[0]
    matcher = kit.matcher(stop_ids=(a,), regex="a")
    with pytest.raises(GrammarError, match="stop id"):
        matcher.fill(allocate(1, kit.vocabulary.size)[0])
    masks = allocate(2, kit.vocabulary.size)
    healthy = kit.matcher(regex="b")
    results = fill_many([(matcher, 0, []), (healthy, 1, [])], masks)
    assert "stop id" in results[0].error
    assert results[1].error is None
    assert set(allowed_ids(masks[1], kit.vocabulary.size)) == set(kit.byte_ids("b"))


def test_reasoning_is_free_but_cannot_end_the_request(kit) -> None:
    matcher = kit.matcher(regex="ok", thinking=True)
    allowed = kit.mask(matcher)
    assert allowed == set(range(kit.vocabulary.tokenizer.vocab_size)) - kit.vocabulary.eos_ids
    assert not matcher.is_accepting
    assert not matcher.accept(1)
    assert matcher.accept(kit.vocabulary.dsml_id)
    assert matcher.accept(kit.vocabulary.think_end_id)
    assert matcher.phase is Phase.GRAMMAR
    allowed = kit.mask(matcher)
    assert set(kit.byte_ids("o")) <= allowed
    assert all(b"ok".startswith(kit.vocabulary.tokenizer.token_bytes(i)) for i in allowed)


def test_fill_says_when_nothing_is_forbidden(corpus) -> None:
    """Reasoning without any row past the tokens and with calls left to the model: no mask is needed."""
    from abyssal.structured.compiler import GrammarCompiler
    from abyssal.structured.spec import StructuredOutput
    from abyssal.structured.vocabulary import Vocabulary

    tokenizer = corpus.make_vocabulary().tokenizer
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, [1])
    compiler = GrammarCompiler(vocabulary)
    row = allocate(1, vocabulary.size)[0]
    assert not compiler.compile(StructuredOutput(tools=TOOLS, thinking=True)).matcher().fill(row)
    assert len(allowed_ids(row, vocabulary.size)) == vocabulary.size
    assert compiler.compile(StructuredOutput(regex="a", thinking=True)).matcher().fill(row)
    assert compiler.compile(StructuredOutput(regex="a")).matcher().fill(row)


def test_ids_past_the_tokens_are_never_allowed(kit, corpus) -> None:
    tail = set(range(kit.vocabulary.tokenizer.vocab_size, kit.vocabulary.size))
    assert tail
    for spec in SPECS.values():
        matcher = kit.matcher(**spec)
        for _, allowed in walk(kit, corpus, matcher, 1, 20):
            assert not allowed & tail
    masks = np.full((1, allocate(1, kit.vocabulary.size).shape[1]), -1, dtype=np.int32)
    fill_many([(kit.matcher(regex="[\\s\\S]*"), 0, [])], masks)
    assert not set(allowed_ids(masks[0], masks.shape[1] * 32).tolist()) & set(
        range(kit.vocabulary.tokenizer.vocab_size, masks.shape[1] * 32)
    )
