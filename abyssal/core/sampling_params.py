"""How one request is sampled. Names follow vLLM where they exist there; docs/sampling.md has the order of operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from .errors import InvalidRequest

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy decoding."""

MAX_LOGPROBS = 20
MAX_N = 16384
MAX_INT32 = 2**31 - 1

BadWord = str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; immutable and checked on construction.

    Attributes:
        temperature: >= 0; below 1e-5 is greedy (highest logit, lowest id on ties).
        top_p: in (0, 1]; smallest set of most likely tokens whose mass reaches it.
        top_k: 0 or -1 keeps all; otherwise only the k most likely, lowest ids first on ties.
        min_p: in [0, 1]; drops tokens less likely than this times the most likely one.
        top_k_top_p: "sequential" takes top_p of what top_k kept, "joint" of all and then keeps the shorter of the two lists.
        presence_penalty: in [-2, 2]; subtracted from the logits of tokens that were generated.
        frequency_penalty: in [-2, 2]; subtracted for each time that a token was generated.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in prompt or output.
        logit_bias: ids and what is added to their logits, in [-100, 100].
        allowed_token_ids: only these ids may be drawn; None for all.
        bad_words: texts or sequences of ids that are never completed; a text counts as tokenized alone and after a space.
        n: how many outputs are drawn for the prompt, each with noise of its own.
        seed: any 64-bit integer; None draws one when the request is added.
        max_tokens: generated tokens at most; None up to the model's length.
        min_tokens: before this many generated tokens neither EOS nor an id of `stop_token_ids` is drawn, and no stop obeyed.
        thinking_token_budget: tokens after `<think>` at most, before `</think>` is forced; None for no limit.
        stop: strings that end the text; cut off unless `include_stop_str_in_output`, and not looked for in reasoning.
        stop_token_ids: ids that end the request like EOS does.
        ignore_eos: go on after EOS. Does not switch off `stop` or `stop_token_ids`.
        logprobs: None, or how many most likely tokens to report beside the chosen one (0..20).
        prompt_logprobs: the same for each prompt token after the first; always raw.
        logprobs_mode: "raw", of the model's logits, or "processed", of the distribution that was drawn from.
        detokenize: produce text; False leaves only ids.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.

    Raises:
        InvalidRequest: naming the parameter, the value and the range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_k_top_p: Literal["sequential", "joint"] = "sequential"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[BadWord, ...] = ()
    n: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    thinking_token_budget: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_counts()
        _choice("top_k_top_p", self.top_k_top_p, ("sequential", "joint"))
        _choice("logprobs_mode", self.logprobs_mode, ("raw", "processed"))
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, getattr(self, name), "must be True or False")
        self._normalise()
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop", self.stop, "stop strings need detokenize=True")
        if self.n > 1 and self.is_greedy:
            raise InvalidRequest("n", self.n, f"must be 1 with temperature={self.temperature}: greedy outputs are equal")

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)

    def _check_counts(self) -> None:
        _integer("top_k", self.top_k, -1, MAX_INT32)
        _integer("n", self.n, 1, MAX_N)
        _integer("min_tokens", self.min_tokens, 0, MAX_INT32)
        optional = {
            "seed": (-(2**63), 2**64 - 1),
            "max_tokens": (1, MAX_INT32),
            "thinking_token_budget": (0, MAX_INT32),
            "logprobs": (0, MAX_LOGPROBS),
            "prompt_logprobs": (0, MAX_LOGPROBS),
        }
        for name, (low, high) in optional.items():
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")

    def _normalise(self) -> None:
        """Check what is given as collections and keep it as tuples."""
        changed = {
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "bad_words": _bad_words(self.bad_words),
            "logit_bias": _biases(self.logit_bias),
        }
        if self.allowed_token_ids is not None:
            changed["allowed_token_ids"] = _ids("allowed_token_ids", self.allowed_token_ids)
            if not changed["allowed_token_ids"]:
                raise InvalidRequest("allowed_token_ids", self.allowed_token_ids, "must name an id; None allows all")
        for name, value in changed.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens came before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping, refusing unknown keys.

        Raises:
            InvalidRequest: for an unknown key or a bad value.
        """
        known = {f.name for f in fields(cls)}
        for key in values:
            if key not in known:
                raise InvalidRequest(
                    str(key), values[key], f"unknown sampling parameter; known are {', '.join(sorted(known))}"
                )
        return cls(**values)


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidRequest(name, value, f"must be one of {', '.join(allowed)}")


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, value, f"must be a number in {interval}")
    inside = value <= high and (value > low if open_low else value >= low)
    if not inside or not -1e300 < value < 1e300:
        raise InvalidRequest(name, value, f"must be a finite number in {interval}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(name, value, f"must be an integer in [{low}, {high}]")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else () if value is None else value
    if not _is_list(items) or not all(isinstance(s, str) and s for s in items):
        raise InvalidRequest(name, value, "must be a non-empty string or a sequence of them")
    return tuple(items)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    items = () if value is None else value
    if not _is_list(items):
        raise InvalidRequest(name, value, "must be a sequence of token ids")
    for item in items:
        _integer(name, item, 0, MAX_INT32)
    return tuple(dict.fromkeys(items))


def _bad_words(value: Any) -> tuple[BadWord, ...]:
    items = () if value is None else value
    expected = "must be a sequence of texts or of sequences of token ids, none of them empty"
    if not _is_list(items):
        raise InvalidRequest("bad_words", value, expected)
    words: list[BadWord] = []
    for item in items:
        if isinstance(item, str):
            if not item.strip():
                raise InvalidRequest("bad_words", item, "must hold more than white space")
            words.append(item)
        elif _is_list(item) and len(item):
            for token_id in item:
                _integer("bad_words", token_id, 0, MAX_INT32)
            words.append(tuple(item))
        else:
            raise InvalidRequest("bad_words", item, expected)
    return tuple(dict.fromkeys(words))


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs in ascending order of the id; ids may be spelled as text, as JSON's keys are."""
    pairs = list(value.items()) if isinstance(value, Mapping) else [] if value is None else value
    if not _is_list(pairs) or not all(_is_list(pair) and len(pair) == 2 for pair in pairs):
        raise InvalidRequest("logit_bias", value, "must be a mapping of token ids to numbers in [-100, 100]")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
        _integer("logit_bias", token_id, 0, MAX_INT32)
        _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if token_id in biases:
            raise InvalidRequest("logit_bias", value, f"names token id {token_id} twice")
        biases[token_id] = float(bias)
    return tuple(sorted(biases.items()))
