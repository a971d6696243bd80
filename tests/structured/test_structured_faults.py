"""Faults that other systems have had with structured output, each with its own small input.

Cases 11 to 21 and 24 as far as they concern grammars; tests/engine/test_known_faults.py lists all 26 and where they are.
"""

import json

import numpy as np
import pytest

from abyssal.core.errors import InvalidRequest
from abyssal.structured.mask import allocate, allowed_ids, apply_mask
from abyssal.structured.matcher import fill_many
from abyssal.structured.rules import Phase
from abyssal.structured.spec import StructuredOutput

OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def generate(kit, matcher, logits: np.ndarray, limit: int = 200) -> tuple[list[int], bool]:
    """Take the likeliest allowed token until a stop id; whether one came."""
    masks, written = allocate(1, kit.vocabulary.size), []
    while len(written) < limit:
        matcher.fill(masks[0])
        row = logits[None].astype(np.float32)
        apply_mask(row, masks)
        token_id = int(row[0].argmax())
        assert matcher.accept(token_id)
        if matcher.phase is Phase.DONE:
            return written, True
        written.append(token_id)
    return written, False


def test_11_reasoning_that_ends_inside_an_accepted_run(kit) -> None:
    """Accepted run [x, </think>, {]: the next mask forbids a second brace."""
    x, brace = kit.byte_ids("x{")
    drafts = [x, kit.vocabulary.think_end_id, brace]
    matcher = kit.matcher(json=OBJECT, thinking=True)
    masks = allocate(4, kit.vocabulary.size)
    assert fill_many([(matcher, 0, drafts)], masks)[0].num_legal == 3
    rows = [set(allowed_ids(row, kit.vocabulary.size).tolist()) for row in masks]
    assert brace in rows[0]  # still reasoning
    assert brace in rows[1]
    assert x not in rows[2]  # constrained from the token behind </think> on
    assert brace not in rows[3]
    assert all(matcher.accept(i) for i in drafts)
    assert kit.mask(matcher) == rows[3]


def test_12_no_drafts_at_all(kit) -> None:
    matcher = kit.matcher(json=OBJECT)
    masks = np.zeros((1, allocate(1, kit.vocabulary.size).shape[1]), dtype=np.int32)
    result = fill_many([(matcher, 0, [])], masks)[0]
    assert (result.num_legal, result.error) == (0, None)
    assert set(allowed_ids(masks[0], kit.vocabulary.size).tolist()) == kit.mask(matcher)
    assert fill_many([], masks) == []


def test_13_illegal_drafts(kit) -> None:
    """Expression ab*c, drafts a z c: one is accepted, and nothing remains of the others."""
    matcher = kit.matcher(regex="ab*c")
    masks = allocate(4, kit.vocabulary.size)
    drafts = kit.byte_ids("azc")
    assert fill_many([(matcher, 0, drafts)], masks)[0].num_legal == 1
    assert drafts[1] not in allowed_ids(masks[1], kit.vocabulary.size)
    assert matcher.num_tokens == 0
    assert kit.feed(matcher, kit.byte_ids("abc")) == 3


def test_14_a_stop_id_of_the_request_cannot_cut_the_answer(kit) -> None:
    """The likeliest token everywhere is a stop id that is text in the middle of an object."""
    stop = kit.byte_ids("a")[0]
    logits = np.zeros(kit.vocabulary.size)
    logits[stop] = 100
    logits[kit.byte_ids('"')[0]] = 50
    written, stopped = generate(
        kit,
        kit.matcher(
            stop_ids=(stop,),
            json={
                "type": "object",
                "properties": {"b": {"type": "string"}},
                "required": ["b"],
                "additionalProperties": False,
            },
        ),
        logits,
    )
    assert stopped
    assert json.loads(kit.text(written)) == {"b": ""}


def test_15_any_eos_id_ends_the_answer(kit) -> None:
    """The tokenizer's own EOS, though another one stands first in the list."""
    for eos in kit.vocabulary.eos_ids:
        logits = np.zeros(kit.vocabulary.size)
        logits[eos] = 9
        written, stopped = generate(kit, kit.matcher(regex="ok"), logits, limit=3)
        assert stopped
        assert kit.text(written) == "ok"


def test_16_a_finished_grammar_leaves_stop_ids_only(kit) -> None:
    """min_tokens may not empty the mask: the matcher says that the answer is finished, and the grammar wins."""
    matcher = kit.matcher(json={"type": "boolean"})
    logits = np.zeros(kit.vocabulary.size)
    written, stopped = generate(kit, matcher, logits)
    assert stopped
    assert json.loads(kit.text(written)) in (True, False)
    matcher.rollback(1)
    assert matcher.is_finished
    assert kit.mask(matcher) == kit.vocabulary.eos_ids


def test_17_keywords_that_were_ignored_elsewhere(kit) -> None:
    """A pattern with a length, and allOf of two branches: enforced here."""
    length = {"type": "string", "pattern": "^a+", "maxLength": 2}
    assert kit.accepts('"aa"', json=length)
    assert kit.rejects('"aaaaa"', json=length)
    both = {"allOf": [{"type": "string"}, {"enum": ["yes", "no", 42]}]}
    assert kit.accepts('"no"', json=both)
    assert kit.rejects("42", json=both)


def test_18_whitespace_is_bounded_and_never_mandatory(kit) -> None:
    """A model that likes newlines best ends all the same; and the tightest spelling is accepted."""
    logits = np.zeros(kit.vocabulary.size)
    for i in kit.vocabulary.text_ids:
        if not kit.vocabulary.tokenizer.token_bytes(i).strip():
            logits[i] = 50
    logits[kit.byte_ids('"')[0]] = 20
    for whitespace, limit in ((2, 40), (0, 20)):
        written, stopped = generate(
            kit, kit.matcher(json=OBJECT, max_whitespace=whitespace), logits - (kit_newline_in_string(kit)), limit
        )
        assert stopped
        assert json.loads(kit.text(written)).keys() == {"a"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for whitespace in (0, 1, 2):
        assert kit.accepts('{"a":1}', json=schema, max_whitespace=whitespace)
    assert kit.rejects('{"a": 1}', json=schema, max_whitespace=0)
    assert kit.accepts('{\n "a":\n 1 }', json=schema)
    assert kit.rejects('{\n  "a": 1}', json=schema)


def kit_newline_in_string(kit) -> np.ndarray:
    """A dislike of spaces, which strings may hold without end."""
    dislike = np.zeros(kit.vocabulary.size)
    for i in kit.vocabulary.text_ids:
        if b" " in kit.vocabulary.tokenizer.token_bytes(i):
            dislike[i] = 100
    return dislike


def test_19_logits_past_the_tokens_are_never_sampled(kit) -> None:
    logits = np.zeros(kit.vocabulary.size)
    logits[kit.vocabulary.tokenizer.vocab_size :] = 100
    for spec in ({"regex": "[\\s\\S]{3}"}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        written, _ = generate(kit, kit.matcher(**spec), logits, limit=3)
        assert max(written, default=0) < kit.vocabulary.tokenizer.vocab_size
    wide = np.zeros((1, kit.vocabulary.size + 64), dtype=np.float32)
    masks = allocate(1, kit.vocabulary.size)
    kit.matcher(regex="a").fill(masks[0])
    apply_mask(wide, masks)
    assert np.isneginf(wide[0, kit.vocabulary.tokenizer.vocab_size :]).all()


def test_20_bounded_repetitions(kit) -> None:
    schema = {"type": "string", "pattern": "^[^\\n]{1,129}$"}
    assert kit.accepts(f'"{"x" * 129}"', json=schema)
    assert kit.rejects(f'"{"x" * 130}"', json=schema)
    with pytest.raises(InvalidRequest, match="250000 positions"):
        kit.compiler.compile(StructuredOutput(regex="(a{1,500}){1,500}"))


def test_21_calls_that_follow_each_other_behind_one_newline(kit) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "strict": False, "parameters": {"properties": {"n": {"type": "integer"}}}},
        }
    ]
    value = '<｜DSML｜ parameter name="n" string="false">1</｜DSML｜ parameter>'
    call = f'<｜DSML｜ invoke name="f">\n{value}\n</｜DSML｜ invoke>\n'
    assert kit.accepts(f"\n\n<｜DSML｜ calls>\n{call}{call}</｜DSML｜ calls>", tools=tools)
    # Functions that are not strict are constrained all the same: no markup leaks into the text.
    assert kit.rejects(f"Text <｜DSML｜ calls>\n{call}</｜DSML｜ calls>", tools=tools)
    assert kit.rejects(f"\n\n<｜DSML｜ calls>\n{call.replace('>1<', '>x<')}</｜DSML｜ calls>", tools=tools)


def test_24_tokens_behind_the_end_are_refused_without_a_trace(kit, capfd) -> None:
    matcher = kit.matcher(json={"type": "boolean"})
    ids = kit.byte_ids("true")
    assert kit.feed(matcher, ids) == len(ids)
    assert matcher.accept(1)
    for token_id in (1, ids[0], kit.vocabulary.dsml_id):
        assert not matcher.accept(token_id)
    assert kit.mask(matcher) == kit.vocabulary.eos_ids
    masks = allocate(3, kit.vocabulary.size)
    assert fill_many([(matcher, 0, [1, ids[0]])], masks)[0].num_legal == 0
    assert matcher.forced_tokens() == []
    matcher.rollback(1)
    assert matcher.is_accepting
    assert capfd.readouterr() == ("", "")
