"""Rewritten expressions: what they match is a match for Python and for ECMA-262, and most of what both match is matched."""

import itertools
import json
import re
import warnings

import pytest

from abyssal.structured.regex import MAX_POSITIONS, RegexError, is_writable, literal, rewrite

ALPHABET = ["a", "b", "1", "_", "-", " ", "\n", "\r", "é", "٣", "\u2028", "]", "^", "&"]
TEXTS = ["".join(t) for n in range(4) for t in itertools.product(ALPHABET, repeat=n) if n < 3 or t[0] in "ab1"]

# Pattern, and the same in Python's words as ECMA-262 reads it.
PATTERNS = [
    ("^a+b?$", r"\Aa+b?\Z"),
    ("a|^b", r"a|\Ab"),
    ("^(a|b1)*$", r"\A(a|b1)*\Z"),
    ("^[ab]{2,3}$", r"\A[ab]{2,3}\Z"),
    ("^a{2}", r"\Aa{2}"),
    ("^a+?b*?$", r"\Aa+?b*?\Z"),
    ("^\\d$", r"\A[0-9]\Z"),
    ("^\\D$", r"\A[^0-9]\Z"),
    ("^\\w+$", r"\A[0-9A-Za-z_]+\Z"),
    ("^\\W$", r"\A[^0-9A-Za-z_]\Z"),
    ("[^\\w]$", r"[^0-9A-Za-z_]\Z"),
    ("^[\\W\\d]$", r"\A(?:[^0-9A-Za-z_]|[0-9])\Z"),
    ("^[^\\W\\d]$", r"\A[A-Za-z_]\Z"),
    ("^.$", "\\A[^\\n\\r\u2028\u2029]\\Z"),
    ("^\\s\\S$", r"\A\s\S\Z"),
    ("^[\\s\\S]$", r"\A[\s\S]\Z"),
    ("^[a\\-\\]]$", r"\A[a\-\]]\Z"),
    ("^[a^&&b]$", r"\A[a^&b]\Z"),
    ("^[[a]$", r"\A[\[a]\Z"),
    ("^[a-]$", r"\A[a\-]\Z"),
    ("\\u0061\\x31", "a1"),
    ("^\\u00e9$", r"\Aé\Z"),
    ("^(?:a)(?<n>b)$", r"\A(?:a)(?P<n>b)\Z"),
    ("^$", r"\A\Z"),
    ("^(|a)$", r"\A(|a)\Z"),
    ("(^a|b$)", r"(\Aa|b\Z)"),
]


@pytest.mark.parametrize(("pattern", "ecma"), PATTERNS, ids=[p for p, _ in PATTERNS])
def test_matches_are_matches_for_every_reader(kit, pattern: str, ecma: str) -> None:
    template = kit.matcher(json={"type": "string", "pattern": pattern})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Python may read [[ and && in another way some day
        python = re.compile(pattern.replace("?<n>", "?P<n>"))
    matched = missed = 0
    for text in TEXTS:
        ids = kit.byte_ids(json.dumps(text, ensure_ascii=False))
        matcher = template.fork()
        accepted = all(matcher.accept(i) for i in ids) and matcher.is_accepting
        both = bool(python.search(text)) and bool(re.search(ecma, text))
        assert both or not accepted, f"{text!r} is accepted"
        matched += accepted
        missed += both and not accepted
    assert matched > 0
    assert missed <= matched, "most of what everybody would match is not accepted"


@pytest.mark.parametrize("pattern", [p for p, _ in PATTERNS if "(^" not in p])
def test_searched_form_matches_the_same_texts(kit, pattern: str) -> None:
    """For raw text, where the engine does not search: the expression is padded instead."""
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": pattern}}, "required": ["p"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    raw = kit.matcher(tools=tools, tool_choice="required", tools_opened=True)
    assert kit.feed(raw, kit.ids('<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="p" string="true">')) > 0
    quoted = kit.matcher(json={"type": "string", "pattern": pattern})
    closing = kit.ids("</｜DSML｜ parameter>\n")
    for text in TEXTS[:200]:
        in_json, in_tag = quoted.fork(), raw.fork()
        expected = (
            all(in_json.accept(i) for i in kit.byte_ids(json.dumps(text, ensure_ascii=False))) and in_json.is_accepting
        )
        assert all(in_tag.accept(i) for i in kit.byte_ids(text) + closing) == expected, repr(text)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)", "look-ahead"),
        ("(?!a)", "look-ahead"),
        ("(?<=a)", "look-behind"),
        ("(?<!a)", "look-behind"),
        ("(?>a)", "atomic"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("(a)\\1", "back-references"),
        ("(?<n>a)\\k<n>", "back-references"),
        ("\\bfoo\\b", "word boundaries"),
        ("a\\Z", "write \\$"),
        ("a^b", "ends of an alternative"),
        ("a$b", "ends of an alternative"),
        ("(^a)+", "cannot be repeated"),
        ("a++", "possessive"),
        ("a**", "cannot be repeated"),
        ("*a", "nothing to repeat"),
        ("a{,3}", "does not start a repetition"),
        ("a{3,1}", "is empty"),
        ("(a", "not closed"),
        ("a)", "unbalanced"),
        ("[a", "ends too early"),
        ("[]", "read differently"),
        ("[^]", "read differently"),
        ("[b-a]", "reversed"),
        ("[a-\\d]", "range cannot end"),
        ("\\q", "escape"),
        ("\\", "ends too early"),
        ("\\ud800", "surrogate"),
        ("\\u12", "hexadecimal"),
        ("\\u{110000}", "no such character"),
        ("\\p{Script=Greek}", "general categories"),
        ("\x01", "control character"),
        ("[\\x00-\\x07]", "only control characters"),
        ("(" * 70 + ")" * 70, "nested more than 64"),
        (f"a{{{MAX_POSITIONS + 1}}}", "positions"),
        ("((a{1,50}){1,50}){1,50}", "125000 positions"),
    ],
)
def test_refused_with_a_reason(pattern: str, reason: str) -> None:
    with pytest.raises(RegexError, match=reason):
        rewrite(pattern)


def test_only_constructs_that_readers_disagree_on_are_inexact() -> None:
    assert [rewrite(p).is_exact for p in ("^a[b-c]{2}$", "[^\\n]", "\\x41", "\\d", "a.", "[\\w-]", "\\S")] == [True] * 3 + [
        False
    ] * 4


@pytest.mark.parametrize(
    "text", ["a", "a.b*c", "/", "\\", "\n\t", "\x00", "é😀", " ", "[]{}()^$|?+-", "<>!@#%&*_=~`'\";:,", "\u2028"]
)
def test_literals_match_themselves_only(kit, text: str) -> None:
    assert "/" not in re.sub(r"\\.", "", literal(text)), "a bare slash would end an expression in Lark"
    assert kit.rejects(text + "x", choice=[text])
    assert kit.accepts(text, choice=[text, text + text])


def test_writable_texts() -> None:
    assert [is_writable(t) for t in ("a\n\t\b\f\r", "\x01", "\x7f", "é")] == [True, False, False, True]
