"""LogitRules: what a request's parameters do to its logits before temperature.

The order is fixed: repetition penalty, frequency and presence penalty, bias; then what masks tokens, so that nothing
lifts a masked one again: grammar and `allowed_token_ids`, `bad_words`, `min_tokens`, and last the forced end of thinking.
Everything is a function of the sequence's own tokens, drafted ones included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..core.sampling_params import SamplingParams
from ..ops.sampling import LogitAdjustments
from .token_counts import TokenCounts

Mask = npt.NDArray[np.uint32]
"""Bit v & 31 of word v >> 5 is 1 where token v is allowed."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TokenRoles:
    """Ids of the vocabulary that rules know.

    Attributes:
        eos: end a text.
        think_start, think_end: enclose reasoning; None if the vocabulary has no such tokens.
    """

    vocab_size: int
    eos: frozenset[int] = frozenset()
    think_start: int | None = None
    think_end: int | None = None


@dataclass(frozen=True)
class LogitChange:
    """One row's share of `LogitAdjustments`.

    Attributes:
        ids: int32 [E], none twice, in any order.
        divisor, minus, plus: float32 [E].
        mask: the tokens that are allowed, or None for all.
    """

    ids: npt.NDArray[np.int32]
    divisor: Floats
    minus: Floats
    plus: Floats
    mask: Mask | None


class LogitRules:
    """The rules of one request and what they remember of its tokens."""

    def __init__(
        self, params: SamplingParams, roles: TokenRoles, token_ids: Sequence[int] = (), num_prompt_tokens: int | None = None
    ) -> None:
        """A sequence with all its tokens so far.

        Args:
            num_prompt_tokens: leading tokens that were not generated; None for all.
        """
        prompt = list(token_ids[:num_prompt_tokens])
        self._params, self._roles = params, roles
        self._bad_words = [word for word in params.bad_words if not isinstance(word, str)]
        assert len(self._bad_words) == len(params.bad_words), "bad words must be token ids by now"
        self._end_ids = {*params.stop_token_ids} | (set() if params.ignore_eos else roles.eos)
        self._allowed = None if params.allowed_token_ids is None else mask_of(params.allowed_token_ids, roles.vocab_size)
        self._counts = TokenCounts(prompt if params.repetition_penalty != 1 else ()) if params.has_penalties else None
        self._output: list[int] = []
        self._num_thinking = self._thinking_after(None, prompt)
        self.append(token_ids[len(prompt) :])

    @staticmethod
    def are_needed(params: SamplingParams) -> bool:
        """Whether these parameters change any logits."""
        return bool(
            params.has_penalties
            or params.logit_bias
            or params.bad_words
            or params.allowed_token_ids is not None
            or params.min_tokens
            or params.thinking_token_budget is not None
        )

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens were generated."""
        self._output += token_ids
        self._num_thinking = self._thinking_after(self._num_thinking, token_ids)
        if self._counts is not None:
            self._counts.append(token_ids)

    def change(self, drafted: Sequence[int] = (), grammar: npt.NDArray[np.int32] | None = None) -> LogitChange | str | None:
        """What happens to the logits of the next token, or why none can be drawn; None if nothing does.

        Args:
            drafted: tokens behind the generated ones.
            grammar: int32 words in which 1 allows a token; what lies past it is forbidden.
        """
        ids, divisor, minus = self._penalties(drafted)
        plus = np.zeros(len(ids), np.float32)
        if self._params.logit_bias:
            ids, divisor, minus, plus = self._with_bias(ids, divisor, minus)
        mask = self._mask(drafted, None if grammar is None else self._widened(grammar))
        if isinstance(mask, str):
            return mask
        return LogitChange(ids, divisor, minus, plus, mask) if len(ids) or mask is not None else None

    def _penalties(self, drafted: Sequence[int]) -> tuple[npt.NDArray[np.int32], Floats, Floats]:
        params = self._params
        if self._counts is None:
            return np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32)
        ids, counts = self._counts.with_drafted(drafted)
        divisor = np.full(len(ids), params.repetition_penalty, np.float32)
        frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
        return ids, divisor, frequency * counts + presence * (counts > 0).astype(np.float32)

    def _with_bias(
        self, ids: npt.NDArray[np.int32], divisor: Floats, minus: Floats
    ) -> tuple[npt.NDArray[np.int32], Floats, Floats, Floats]:
        pairs = self._params.logit_bias
        biased, bias = np.array([i for i, _ in pairs], np.int32), np.array([b for _, b in pairs], np.float32)
        place = np.searchsorted(biased, ids).clip(max=len(biased) - 1)
        known = biased[place] == ids
        fresh = ~np.isin(biased, ids)
        added = int(fresh.sum())
        return (
            np.concatenate((ids, biased[fresh])),
            np.concatenate((divisor, np.ones(added, np.float32))),
            np.concatenate((minus, np.zeros(added, np.float32))),
            np.concatenate((np.where(known, bias[place], np.float32(0)), bias[fresh])),
        )

    def _mask(self, drafted: Sequence[int], grammar: Mask | None) -> Mask | str | None:
        params, roles = self._params, self._roles
        banned = self._completions(drafted)
        num_output = len(self._output) + len(drafted)
        early = self._end_ids if num_output < params.min_tokens else set()
        must_end = self._must_end_thinking(drafted)
        if grammar is None and self._allowed is None and not banned and not early and not must_end:
            return None
        if must_end and roles.think_end is not None and (grammar is None or _allows(grammar, roles.think_end)):
            return mask_of([roles.think_end], roles.vocab_size)
        mask = mask_of(None, roles.vocab_size) if grammar is None else grammar
        if self._allowed is not None:
            mask = mask & self._allowed
        _forbid(mask, banned)
        late = mask.copy()
        _forbid(mask, early)
        if not mask.any() and grammar is not None:
            # a finished grammar has nothing but an end to offer, and is obeyed before min_tokens
            mask = late
        return mask if mask.any() else self._why_empty(grammar, early)

    def _why_empty(self, grammar: Mask | None, early: Iterable[int]) -> str:
        names = {
            "the grammar": grammar is not None,
            "allowed_token_ids": self._allowed is not None,
            "bad_words": bool(self._bad_words),
            "min_tokens": bool(early),
        }
        return f"no token is left to draw: {', '.join(name for name, is_used in names.items() if is_used)} forbid all"

    def _completions(self, drafted: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word."""
        if not self._bad_words:
            return []
        longest = max(map(len, self._bad_words)) - 1
        tail = [*self._output[-longest:], *drafted][-longest:] if longest else []
        return [word[-1] for word in self._bad_words if tuple(tail[len(tail) - len(word) + 1 :]) == word[:-1]]

    def _must_end_thinking(self, drafted: Sequence[int]) -> bool:
        budget = self._params.thinking_token_budget
        if budget is None:
            return False
        thinking = self._thinking_after(self._num_thinking, drafted)
        return thinking is not None and thinking >= budget

    def _thinking_after(self, num_thinking: int | None, token_ids: Sequence[int]) -> int | None:
        """Tokens since `<think>`, None outside of reasoning, after some more tokens."""
        if self._params.thinking_token_budget is None:
            return None
        for token_id in token_ids:
            if token_id == self._roles.think_start:
                num_thinking = 0
            elif token_id == self._roles.think_end:
                num_thinking = None
            elif num_thinking is not None:
                num_thinking += 1
        return num_thinking

    def _widened(self, grammar: npt.NDArray[np.int32]) -> Mask:
        """A copy as wide as the vocabulary."""
        mask = np.zeros(_num_words(self._roles.vocab_size), np.uint32)
        width = min(len(mask), len(grammar))
        mask[:width] = grammar[:width].view(np.uint32)
        used = self._roles.vocab_size % 32
        if used:
            mask[-1] &= np.uint32((1 << used) - 1)
        return mask


def mask_of(token_ids: Sequence[int] | None, vocab_size: int) -> Mask:
    """The mask that allows these ids, or all."""
    bits = np.zeros(32 * _num_words(vocab_size), np.uint8)
    bits[slice(vocab_size) if token_ids is None else list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def pack(changes: Sequence[LogitChange], vocab_size: int) -> LogitAdjustments:
    """The changes of rows 0, 1, .. in one."""
    lengths = [len(change.ids) for change in changes]
    masked = [row for row, change in enumerate(changes) if change.mask is not None]
    masks = [change.mask for change in changes if change.mask is not None]
    stacked = np.stack(masks) if masks else np.zeros((0, _num_words(vocab_size)), np.uint32)
    parts = {
        name: torch.from_numpy(np.concatenate([getattr(change, name) for change in changes]))
        for name in ("ids", "divisor", "minus", "plus")
    }
    return LogitAdjustments(
        rows=torch.from_numpy(np.repeat(np.arange(len(changes), dtype=np.int32), lengths)),
        masked=torch.tensor(masked, dtype=torch.int32),
        masks=torch.from_numpy(stacked.view(np.int32)),
        **parts,
    )


def _num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _allows(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))


def _forbid(mask: Mask, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        mask[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
