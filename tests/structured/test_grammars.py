"""Expressions, choices, and grammars in GBNF and Lark."""

import pytest

from abyssal.core.errors import InvalidRequest
from abyssal.structured.gbnf import GbnfError, gbnf_to_lark
from abyssal.structured.spec import StructuredOutput

ARITHMETIC = """
root  ::= expr            # a comment with "quotes" ::= inside
expr  ::= term ( [-+] term )*
term  ::= num | "(" expr ")"
num   ::= [0-9]+ ("." [0-9]{1,2})?
"""


@pytest.mark.parametrize(
    ("regex", "accepted", "rejected"),
    [
        ("ab*c", ["ac", "abbc"], ["ab", "abcd", "xac"]),
        ("^ab$", ["ab"], ["xab", "abx"]),
        ("a/b\\d{2}|é+", ["a/b12", "éé"], ["a/b1", ""]),
        (".*", ["", "a b"], ["a\nb"]),
        ("[\\s\\S]*", ["", "a\nb"], []),
    ],
)
def test_the_whole_text_matches_an_expression(kit, regex: str, accepted: list[str], rejected: list[str]) -> None:
    assert [t for t in accepted if not kit.accepts(t, regex=regex)] == []
    assert [t for t in rejected if not kit.rejects(t, regex=regex)] == []


def test_choices(kit) -> None:
    choice = ["yes", "yes, but", 'a"b/c\\d\n', "é😀", "[a-z]"]
    assert [t for t in choice if not kit.accepts(t, choice=choice)] == []
    assert [t for t in ("ye", "no", "yes,", "a", "abc") if not kit.rejects(t, choice=choice)] == []


@pytest.mark.parametrize(
    ("grammar", "accepted", "rejected"),
    [
        (ARITHMETIC, ["1", "1+2", "(1.25-3)+(4)"], ["1+", "1.255", "()", "a"]),
        ('root ::= "a" root | "b"', ["b", "aaab"], ["a", "ba"]),
        ('root ::= item (", " item)*\nitem ::= [a-z]+ [a-z]', ["ab", "ab, cde"], ["a", "ab,cd"]),
        ('root ::= "\\x41" "\\u00e9" "\\U0001F600" "\\"/\\\\\\n"', ['Aé😀"/\\\n'], ["A"]),
        ("root ::= [^a-c\\]\\n]{2} [\\u0041-\\u0043-]", ["xyA", "é]-"[0] + "z-"], ["axA", "xyD", "x]A"]),
        ("root ::= . .", ["a\n", "é😀"], ["a", "abc"]),
        ('root ::= "yes" |\n  "no"\n', ["yes", "no"], ["yesno"]),
        ('root ::= ("a"\n | "b")+ foo-Bar?\nfoo-Bar ::= "x"{2,3}', ["ab", "axx", "bxxx"], ["ax", "x", "axxxx"]),
        ('root ::= "a"{0,} "b"{2}', ["bb", "aabb"], ["b", "bbb"]),
        ('start: "a" num*\nnum: /[0-9]+/ ","', ["a", "a1,", "a12,3,"], ["a1", "1,"]),
        ('start: "v=" %json {"type": "integer", "maximum": 5}', ["v=5"], ["v=6", "v="]),
        ('start: "<t>" /<b>/ // a <comment>\n', ["<t><b>"], ["<t>"]),
    ],
)
def test_grammars(kit, grammar: str, accepted: list[str], rejected: list[str]) -> None:
    assert [t for t in accepted if not kit.accepts(t, grammar=grammar)] == []
    assert [t for t in rejected if not kit.rejects(t, grammar=grammar)] == []


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(?=a)", "look-ahead"),
        ("regex", "(a", "not closed"),
        ("grammar", 'x ::= "a"', "no rule named root"),
        ("grammar", "root ::= x", "x is used in root but not defined"),
        ("grammar", 'root ::= "a"\nroot ::= "b"', "defined twice"),
        ("grammar", "root ::= 'a'", 'unexpected "\'" (line 1)'),
        ("grammar", 'root ::= ("a"', "not closed"),
        ("grammar", 'root ::= "a', "inside of quotes"),
        ("grammar", 'root ::= "\\q"', "escape \\q"),
        ("grammar", 'root ::= "a"{3,2}', "is empty"),
        ("grammar", "root ::= <think>", "unexpected '<'"),
        ("grammar", 'other: "a"', "start"),
        ("grammar", "start: <think>", "line 1: tokens by name"),
        ("grammar", "start: <[5]>", "line 1: tokens by name"),
        ("grammar", "start: a\na[max_tokens=3]: /a+/", "line 2: max_tokens"),
        ("grammar", 'start: a\na[stop="x"]: /a+/', "line 2: stop"),
        ("grammar", "start: @other", "refers to another grammar"),
        ("grammar", 'start: %json {"not": {}}', "%json $.not: is not enforced"),
        ("grammar", "start: %json {", "needs a JSON object"),
        ("grammar", '%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance is not supported"),
        ("grammar", "start: %lark {}", "%lark is not supported"),
        ("grammar", "start: /(?=a)/", "look"),
        ("grammar", "start: a b", "unknown name"),
    ],
)
def test_refused_with_a_reason(kit, kind: str, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kit.compiler.compile(StructuredOutput(**{kind: text}))
    assert caught.value.parameter == kind
    assert reason in str(caught.value)


def test_a_grammar_without_recursion_is_one_expression() -> None:
    assert gbnf_to_lark('root ::= a b\na ::= [a-z]+\nb ::= "z"') == "start: /(?:(?:(?:[a-z]){1,})(?:(?:z)))/"
    with pytest.raises(GbnfError, match="nested more than"):
        gbnf_to_lark("root ::= " + "(" * 200 + '"a"' + ")" * 200)


def test_markup_is_no_text(kit) -> None:
    """No added token may stand in a string, an expression or a grammar, nor an id without a token."""
    outside = kit.vocabulary.control_ids | set(range(kit.vocabulary.tokenizer.vocab_size, kit.vocabulary.size))
    for spec, before in (
        ({"json": {"type": "string"}}, '"x'),
        ({"json_object": True}, '{"x'),
        ({"regex": "[\\s\\S]*"}, "x"),
        ({"grammar": 'start: "x" /(?s:.*)/'}, "x"),
    ):
        matcher = kit.matcher(**spec)
        assert kit.feed(matcher, kit.byte_ids(before)) == len(before)
        allowed = kit.mask(matcher)
        expected = set(kit.vocabulary.eos_ids) if matcher.is_accepting else set()
        assert allowed & outside == expected
        assert len(allowed) > 100


@pytest.mark.parametrize(
    "spec",
    [{"choice": ["a<think>b"]}, {"json": {"const": "a<think>b"}}, {"json": {"required": ["</think>"], "type": "object"}}],
)
def test_certain_text_that_reads_like_markup_is_spelled_by_text(kit, spec: dict) -> None:
    """The library tokenizes certain text; no markup token may come out of that."""
    matcher, written = kit.matcher(**spec), []
    while not matcher.is_finished and len(written) < 60:
        forced = matcher.forced_tokens()
        token_id = forced[0] if forced else min(kit.mask(matcher) - kit.vocabulary.eos_ids)
        assert token_id in kit.mask(matcher)
        assert matcher.accept(token_id)
        written.append(token_id)
    assert not kit.vocabulary.control_ids & set(written)
    assert "think>" in kit.text(written)
