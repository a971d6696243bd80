"""From what a user asks to what sequences run with: ids checked, bad words spelled, seeds for each output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..core.errors import InvalidRequest
from ..core.sampling_params import SamplingParams
from ..runner.logit_rules import TokenRoles
from ..text.tokenizer import Tokenizer

THINK_START, THINK_END = "<think>", "</think>"
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def token_roles(vocab_size: int, eos: frozenset[int], tokenizer: Tokenizer | None) -> TokenRoles:
    """Ids that sampling knows, as the tokenizer spells them."""
    if tokenizer is None:
        return TokenRoles(vocab_size, eos)
    return TokenRoles(vocab_size, eos, tokenizer.token_id(THINK_START), tokenizer.token_id(THINK_END))


def prompt_ids(prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Ids of a prompt: text gets BOS if it has none, ids are taken as they are.

    Raises:
        InvalidRequest: for an empty prompt, ids outside of the vocabulary, or text without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("prompt", prompt, "is text, but this model folder has no tokenizer; give token ids")
        if not prompt:
            raise InvalidRequest("prompt", prompt, "is empty; give at least one character")
        return tokenizer.encode(prompt)
    token_ids = list(prompt)
    if not token_ids:
        raise InvalidRequest("prompt", token_ids, "is empty; give at least one token id")
    for position, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"prompt[{position}]", token_id, f"must be a token id in [0, {vocab_size - 1}]")
    return token_ids


def resolve_params(params: SamplingParams, roles: TokenRoles, tokenizer: Tokenizer | None) -> SamplingParams:
    """The parameters with bad words as token ids.

    Raises:
        InvalidRequest: for ids outside of the vocabulary, for what needs a tokenizer that is not there, and for rules that
            leave no token to draw.
    """
    _check_ids(params, roles.vocab_size)
    if params.thinking_token_budget is not None and (roles.think_start is None or roles.think_end is None):
        raise InvalidRequest(
            "thinking_token_budget",
            params.thinking_token_budget,
            f"the tokenizer of this model has no {THINK_START} and {THINK_END}",
        )
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else roles.eos)
    if params.min_tokens and params.allowed_token_ids is not None and ends.issuperset(params.allowed_token_ids):
        raise InvalidRequest("min_tokens", params.min_tokens, "allowed_token_ids holds nothing but ids that end the request")
    if all(not isinstance(word, str) for word in params.bad_words):
        return params
    spelled = [ids for word in params.bad_words for ids in _spellings(word, tokenizer)]
    return replace(params, bad_words=tuple(dict.fromkeys(spelled)))


def seed_of(seed: int, index: int) -> int:
    """The 64-bit seed of one of a request's outputs; the first one's is the request's own."""
    if index == 0:
        return seed
    # SplitMix64 twice over: neighbours of seed or index share nothing, so seed + 1 is no output of seed
    return _mix((_mix(seed) + index * _GOLDEN) & _MASK)


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    named = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": tuple(token_id for token_id, _ in params.logit_bias),
        "bad_words": tuple(i for word in params.bad_words if not isinstance(word, str) for i in word),
    }
    for name, token_ids in named.items():
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise InvalidRequest(name, token_id, f"must be a token id in [0, {vocab_size - 1}]")


def _spellings(word: str | tuple[int, ...], tokenizer: Tokenizer | None) -> Iterator[tuple[int, ...]]:
    """Ids of a bad word as it stands, and as it follows a space."""
    if not isinstance(word, str):
        yield word
        return
    if tokenizer is None:
        raise InvalidRequest("bad_words", word, "texts need a tokenizer, and this model folder has none; give token ids")
    yield tuple(tokenizer.encode(word, add_bos=False))
    yield tuple(tokenizer.encode(" " + word.lstrip(), add_bos=False))
