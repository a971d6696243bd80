import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from abyssal.core.sampling_params import SamplingParams
from abyssal.text.detokenizer import IncrementalDetokenizer, StopStrings
from abyssal.text.tokenizer import Tokenizer

quick = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
sampled_text = st.text(alphabet="ab cé模😀\n", max_size=40)


def single_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """Id of the token for each byte."""
    return {tokenizer.token_bytes(i)[0]: i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}


def run(tokenizer: Tokenizer, ids: list[int], **params: object) -> tuple[IncrementalDetokenizer, list[str]]:
    """Feed ids until a stop string is found, checking that pieces add up to the text."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params))
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        assert detokenizer.text == "".join(pieces)
        if detokenizer.stop_string is not None:
            break
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return detokenizer, pieces


@quick
@given(data=st.data(), skip=st.booleans())
def test_random_ids_give_the_text_of_decoding_them_at_once(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=60))
    detokenizer, _ = run(tokenizer, ids, skip_special_tokens=skip)
    assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)


@quick
@given(ids=st.lists(st.integers(0, 280), max_size=60))
def test_random_bytes_give_the_text_of_decoding_them_at_once(tiny_tokenizer: Tokenizer, ids: list[int]) -> None:
    """The tiny vocabulary's first ids are single bytes, most sequences of which are no characters."""
    detokenizer, _ = run(tiny_tokenizer, ids)
    assert detokenizer.text == tiny_tokenizer.decode(ids)


@quick
@given(text=st.text(max_size=60))
def test_valid_text_never_shows_half_a_character(tiny_tokenizer: Tokenizer, text: str) -> None:
    byte = single_bytes(tiny_tokenizer)
    ids = [byte[b] for b in text.encode()]
    _, pieces = run(tiny_tokenizer, ids)
    assert "".join(pieces) == text
    shown = ""
    for piece in pieces:
        shown += piece
        assert text.startswith(shown)


def test_emoji_over_several_tokens_appears_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("👩🏽‍🚀", add_bos=False)
    assert len(ids) > 4
    _, pieces = run(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == "👩🏽‍🚀"
    assert pieces[0] == ""


def test_unfinished_character_is_shown_at_the_end(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("a𝄞", add_bos=False)[:-1]
    _, pieces = run(tiny_tokenizer, ids)
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == "\ufffd"


def test_finish_may_be_repeated(tiny_tokenizer: Tokenizer) -> None:
    detokenizer, _ = run(tiny_tokenizer, tiny_tokenizer.encode("the cat", add_bos=False), stop=("cats",))
    assert detokenizer.text == "the cat"
    assert detokenizer.finish() == ""
    assert detokenizer.text == "the cat"


def test_kept_special_ids_are_shown(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tiny_tokenizer, SamplingParams(), keep={4})
    for token_id in (3, 4, 5):
        detokenizer.push(token_id)
    assert detokenizer.text == "</think>"


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Brute force: grow the text by characters until it ends with a stop string; the longest such."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            return end, max(matches, key=len)
    return None


@quick
@given(
    text=sampled_text,
    stop=st.lists(st.text(alphabet="ab cé模", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings_are_found_over_token_borders(tokenizer: Tokenizer, text: str, stop: list[str], include: bool) -> None:
    ids = tokenizer.encode(text, add_bos=False)
    detokenizer, _ = run(tokenizer, ids, stop=tuple(stop), include_stop_str_in_output=include)
    match = first_stop(text, tuple(stop))
    if match is None:
        assert detokenizer.stop_string is None
        assert detokenizer.text == text
    else:
        end, found = match
        assert detokenizer.stop_string == found
        assert detokenizer.text == text[: end if include else end - len(found)]


@quick
@given(
    text=sampled_text, stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3), data=st.data()
)
def test_what_is_shown_is_never_taken_back(
    tiny_tokenizer: Tokenizer, text: str, stop: list[str], data: st.DataObject
) -> None:
    """Pieces of any length: the same outcome, and no character more held back than a stop string could need."""
    stops = StopStrings(tuple(stop), include=False)
    shown, given_text, rest = "", "", text
    while rest and stops.found is None:
        cut = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:cut], rest[cut:]
        given_text += piece
        shown += stops.push(piece, active=True)
        if stops.found is None:
            assert 0 <= len(given_text) - len(shown) < max(map(len, stop))
    shown += stops.flush()
    match = first_stop(text, tuple(stop))
    assert shown == (text if match is None else text[: match[0] - len(match[1])])


def test_only_what_may_begin_a_stop_string_is_held_back(tiny_tokenizer: Tokenizer) -> None:
    stops = StopStrings(("\n\nUser:",), include=False)
    assert stops.push("Hello", active=True) == "Hello"
    assert stops.push(" you\n", active=True) == " you"
    assert stops.push("\nU", active=True) == ""
    assert stops.push("p", active=True) == "\n\nUp"


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "xx"), (4, "xx"), (5, "xxabx"), (7, "xxabx"), (8, "xxabxab")])
def test_stop_string_is_not_obeyed_before_min_tokens(tiny_tokenizer: Tokenizer, min_tokens: int, expected: str) -> None:
    """One token a character. "ab" ends with the fourth token, which is the first one that min_tokens=4 allows."""
    byte = single_bytes(tiny_tokenizer)
    ids = [byte[b] for b in b"xxabxab"]
    detokenizer, _ = run(tiny_tokenizer, ids, stop=("ab",), min_tokens=min_tokens)
    assert detokenizer.text == expected


def test_a_stop_string_may_begin_before_min_tokens(tiny_tokenizer: Tokenizer) -> None:
    byte = single_bytes(tiny_tokenizer)
    detokenizer, _ = run(tiny_tokenizer, [byte[b] for b in b"xaby"], stop=("ab",), min_tokens=3)
    assert detokenizer.text == "x"
    detokenizer, _ = run(tiny_tokenizer, [byte[b] for b in b"xaby"], stop=("ab",), min_tokens=4)
    assert detokenizer.text == "xaby"
