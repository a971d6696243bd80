"""How one request is sampled. Names and meanings follow vLLM where they exist there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .errors import InvalidRequest

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy decoding."""

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; immutable and checked on construction.

    Attributes:
        temperature: >= 0; below 1e-5 is greedy (highest logit, lowest id on ties).
        top_p: in (0, 1]; smallest set of most likely tokens whose mass reaches it.
        top_k: 0 or -1 keeps all; otherwise only the k most likely, lowest ids first on ties.
        min_p: in [0, 1]; drops tokens less likely than this times the most likely one.
        seed: any 64-bit integer; None draws one when the request is added.
        max_tokens: generated tokens at most; None up to the model's length.
        min_tokens: no stop is obeyed before this many generated tokens.
        stop: strings that end the text; they are cut off unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the request like EOS does.
        ignore_eos: go on after EOS. Does not switch off `stop` or `stop_token_ids`.
        logprobs: None, or how many most likely tokens to report beside the chosen one (0..20).
        prompt_logprobs: the same for each prompt token after the first.
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
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, getattr(self, name), "must be True or False")
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop", self.stop, "stop strings need detokenize=True")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping, refusing unknown keys.

        Raises:
            InvalidRequest: for an unknown key or a bad value.
        """
        known = {f.name for f in fields(cls)}
        for key in values:
            if key not in known:
                raise InvalidRequest(key, values[key], f"unknown sampling parameter; known are {', '.join(sorted(known))}")
        return cls(**values)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, value, f"must be a number in {interval}")
    inside = math.isfinite(value) and value <= high and (value > low if open_low else value >= low)
    if not inside:
        raise InvalidRequest(name, value, f"must be a finite number in {interval}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(name, value, f"must be an integer in [{low}, {high}]")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(s, str) and s for s in items):
        raise InvalidRequest(name, value, "must be a non-empty string or a sequence of them")
    return tuple(items)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequest(name, value, "must be a sequence of token ids")
    for item in value:
        _integer(name, item, 0, 2**31 - 1)
    return tuple(dict.fromkeys(value))
