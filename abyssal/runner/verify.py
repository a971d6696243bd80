"""Which drafted tokens are kept: the two acceptance rules.

**Coupled.** Draft and target draw with the same noise of (seed, position, token id); a draft is kept iff it is the token
that the target draws. What comes out is always the target's own token, so no draft can change it.

**Rejection** (Leviathan et al., arXiv 2211.17192). Draft x, drawn from q, is kept with probability min(1, p(x) / q(x)); else
a token is drawn from (p - q)+, normalised. Distributed as p, but which token comes depends on the draft. The draws of
drafts, of acceptance and of the residual use noise of their own, so that none of them knows another.

Greedy requests are the same in both: kept iff it is the most likely token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from ..core.batch import SampledToken
from ..core.noise import philox
from ..core.sampling_params import SamplingParams
from ..structured.mask import Mask
from .distribution import Distribution
from .logit_rules import LogitRules
from .sampler import Sampler, SamplingRow

ACCEPT, RESIDUAL, DRAFT = 1, 2, 3
"""Noise domains of rejection. A draft at place k of its block uses DRAFT + k: a position may be drafted several times, and
what is known from an earlier try must tell nothing about the next one."""


@dataclass(frozen=True)
class Verification:
    """Rows of logits that decide the next tokens of one request.

    Attributes:
        first_row: row of the logits that follow the last known token; those of the drafts come behind it.
        draft_ids: drafted tokens, perhaps none.
        position: of the first token to be drawn.
        rules: of the request, if it needs any; they know its tokens up to that position.
        masks: int32 [1 + drafts, words] of the request's grammar, one for each row; None without a grammar. Those behind the
            first draft that the grammar does not allow are not looked at.
    """

    state_slot: int
    first_row: int
    draft_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    position: int
    rules: LogitRules | None = None
    masks: Mask | None = None

    def row(self, place: int) -> SamplingRow:
        """How the token at that place is drawn."""
        mask = None if self.masks is None else self.masks[place]
        return SamplingRow(self.params, self.seed, self.position + place, self.rules, self.draft_ids[:place], mask)


Verified = list[SampledToken] | str
"""The tokens of one request, at least one, or why it failed."""


class AcceptanceRule(Protocol):
    """Draws drafts, and decides which are kept."""

    def draft(self, logits: torch.Tensor, slots: Sequence[int], rows: Sequence[SamplingRow], place: int) -> list[int]:
        """Draw the draft at a place of each block, from float32 [R, V]. Places of a block are drawn in order from 0."""
        ...

    def verify(self, logits: torch.Tensor, requests: Sequence[Verification]) -> list[Verified]:
        """The tokens of each request, from float32 [M, V]."""
        ...


class CoupledAcceptance:
    """Keeps a draft iff the target draws it."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def draft(self, logits: torch.Tensor, slots: Sequence[int], rows: Sequence[SamplingRow], place: int) -> list[int]:
        """As the target draws, with the target's noise. Junk for logits that are no numbers: it will not be kept."""
        return [token.token_id if isinstance(token, SampledToken) else 0 for token in self._sampler.sample(logits, rows)]

    def verify(self, logits: torch.Tensor, requests: Sequence[Verification]) -> list[Verified]:
        results: list[Verified] = [[] for _ in requests]
        going, place = list(range(len(requests))), 0
        while going:
            rows, index = [requests[i].row(place) for i in going], [requests[i].first_row + place for i in going]
            kept = []
            for i, token in zip(going, self._sampler.sample(logits, rows, index), strict=True):
                tokens, drafts = results[i], requests[i].draft_ids
                if isinstance(token, str) or isinstance(tokens, str):
                    results[i] = str(token)
                    continue
                tokens.append(token)
                if place < len(drafts) and token.token_id == drafts[place]:
                    kept.append(i)
            going, place = kept, place + 1
        return results


NOTHING = Distribution(np.zeros(1, np.int64), np.ones(1))
"""Where a draft's logits are no numbers: what it proposes will not be kept."""


class RejectionAcceptance:
    """Keeps a draft with the probability that leaves the target's distribution as it is.

    It remembers, for each slot, what the drafts at hand were drawn from.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._proposed: dict[int, list[Distribution]] = {}

    def draft(self, logits: torch.Tensor, slots: Sequence[int], rows: Sequence[SamplingRow], place: int) -> list[int]:
        ids = []
        for proposed, slot, row in zip(self._sampler.distributions(logits, rows), slots, rows, strict=True):
            usable = proposed if isinstance(proposed, Distribution) else NOTHING
            ids.append(usable.draw(row.seed, row.position, DRAFT + place))
            earlier = self._proposed.get(slot, ()) if place else ()
            self._proposed[slot] = [*earlier, usable]
        return ids

    def verify(self, logits: torch.Tensor, requests: Sequence[Verification]) -> list[Verified]:
        return [self._verify(logits, request) for request in requests]

    def _verify(self, logits: torch.Tensor, request: Verification) -> Verified:
        tokens: list[SampledToken] = []
        for place, draft_id in enumerate(request.draft_ids):
            row, index = request.row(place), [request.first_row + place]
            (target,) = self._sampler.distributions(logits, [row], index)
            if isinstance(target, str):
                return target
            token_id = self._judge(target, request, place, draft_id)
            (token,) = self._sampler.score(logits, [row], index, [token_id])
            if isinstance(token, str):
                return token
            tokens.append(token)
            if token_id != draft_id:
                return tokens
        place = len(request.draft_ids)
        (last,) = self._sampler.sample(logits, [request.row(place)], [request.first_row + place])
        return last if isinstance(last, str) else [*tokens, last]

    def _judge(self, target: Distribution, request: Verification, place: int, draft_id: int) -> int:
        """The draft, or the token in its place."""
        proposed, position = self._proposed[request.state_slot][place], request.position + place
        p, q = target.probability(draft_id), proposed.probability(draft_id)
        if _uniform(request.seed, position) * q < p:
            return draft_id
        return target.minus(proposed).draw(request.seed, position, RESIDUAL)


def _uniform(seed: int, position: int) -> float:
    """The number in (0, 1) that decides on the draft at a position."""
    counter = np.array([[0, position, ACCEPT, 0]], np.uint64)
    word = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))[0, 0]
    return (float(word) + 0.5) / 2.0**32


def without_logprobs(params: SamplingParams) -> SamplingParams:
    """Parameters for drawing drafts, whose log-probabilities nobody asked for."""
    return params if params.logprobs is None else replace(params, logprobs=None)
