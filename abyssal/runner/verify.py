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
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..core.batch import SampledToken
from ..core.sampling_params import SamplingParams
from .noise import gumbel, philox
from .sampler import SamplingRow, sample, support, token_logprobs

ACCEPT, RESIDUAL, DRAFT = 1, 2, 3
"""Noise domains of rejection. A draft at place k of its block uses DRAFT + k: a position may be drafted several times, and
what is known from an earlier try must tell nothing about the next one."""

NOT_FINITE = "the model produced logits that are not finite numbers"


@dataclass(frozen=True)
class Verification:
    """Rows of logits that decide the next tokens of one request.

    Attributes:
        first_row: row of the logits that follow the last known token; those of the drafts come behind it.
        draft_ids: drafted tokens, perhaps none.
        position: of the first token to be drawn.
    """

    state_slot: int
    first_row: int
    draft_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    position: int

    def row(self, place: int) -> SamplingRow:
        """How the token at that place is drawn."""
        return SamplingRow(self.params, self.seed, self.position + place)


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

    def draft(self, logits: torch.Tensor, slots: Sequence[int], rows: Sequence[SamplingRow], place: int) -> list[int]:
        """As the target draws, with the target's noise. Junk for logits that are no numbers: it will not be kept."""
        return [token.token_id if isinstance(token, SampledToken) else 0 for token in sample(logits, rows)]

    def verify(self, logits: torch.Tensor, requests: Sequence[Verification]) -> list[Verified]:
        results: list[Verified] = [[] for _ in requests]
        going, place = list(range(len(requests))), 0
        while going:
            drawn = sample(logits[[requests[i].first_row + place for i in going]], [requests[i].row(place) for i in going])
            kept = []
            for i, token in zip(going, drawn, strict=True):
                tokens, drafts = results[i], requests[i].draft_ids
                if isinstance(token, str) or isinstance(tokens, str):
                    results[i] = NOT_FINITE
                    continue
                tokens.append(token)
                if place < len(drafts) and token.token_id == drafts[place]:
                    kept.append(i)
            going, place = kept, place + 1
        return results


@dataclass(frozen=True)
class Distribution:
    """What a token is drawn from: ids int64 [N], ascending, and their probabilities float64 [N]."""

    ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]

    @classmethod
    def of(cls, logits: npt.NDArray[np.float32], params: SamplingParams) -> Distribution:
        """After temperature and filters, from finite float32 [V]."""
        if params.is_greedy:
            return cls(np.array([logits.argmax()], np.int64), np.ones(1))
        scaled = logits.astype(np.float64) / params.temperature
        ids = support(scaled, params)
        weights = np.exp(scaled[ids] - scaled[ids].max())
        return cls(ids, weights / weights.sum())

    def probability(self, token_id: int) -> float:
        """Of one token; 0 where it was filtered out."""
        i = int(np.searchsorted(self.ids, token_id))
        found = i < len(self.ids) and self.ids[i] == token_id
        return float(self.probabilities[i]) if found else 0.0

    def minus(self, other: Distribution) -> Distribution:
        """The positive part of the difference, normalised; this one where rounding left nothing of it."""
        taken = np.zeros(len(self.ids))
        place = np.searchsorted(other.ids, self.ids).clip(max=len(other.ids) - 1)
        shared = other.ids[place] == self.ids
        taken[shared] = other.probabilities[place[shared]]
        left = np.maximum(self.probabilities - taken, 0.0)
        total = left.sum()
        return Distribution(self.ids, left / total) if total > 0 else self

    def draw(self, seed: int, position: int, domain: int) -> int:
        """A token, by the noise of that domain."""
        possible = self.probabilities > 0
        ids = self.ids[possible]
        return int(ids[np.argmax(np.log(self.probabilities[possible]) + gumbel(seed, position, ids, domain))])


@dataclass
class RejectionAcceptance:
    """Keeps a draft with the probability that leaves the target's distribution as it is.

    It remembers, for each slot, what the drafts at hand were drawn from.
    """

    _proposed: dict[int, list[Distribution]] = field(default_factory=dict)

    def draft(self, logits: torch.Tensor, slots: Sequence[int], rows: Sequence[SamplingRow], place: int) -> list[int]:
        ids = []
        for row_logits, slot, row in zip(logits.numpy(), slots, rows, strict=True):
            usable = np.nan_to_num(row_logits)
            proposed = Distribution.of(usable, row.params)
            ids.append(proposed.draw(row.seed, row.position, DRAFT + place))
            earlier = self._proposed.get(slot, ()) if place else ()
            self._proposed[slot] = [*earlier, proposed]
        return ids

    def verify(self, logits: torch.Tensor, requests: Sequence[Verification]) -> list[Verified]:
        return [self._verify(logits, request) for request in requests]

    def _verify(self, logits: torch.Tensor, request: Verification) -> Verified:
        tokens: list[SampledToken] = []
        for place, draft_id in enumerate(request.draft_ids):
            row_logits = logits[request.first_row + place].numpy()
            if not np.isfinite(row_logits).all():
                return NOT_FINITE
            token_id = self._judge(row_logits, request, place, draft_id)
            wanted = request.params.logprobs
            logprobs = None if wanted is None else token_logprobs(row_logits, token_id, wanted)
            tokens.append(SampledToken(token_id, logprobs))
            if token_id != draft_id:
                return tokens
        place = len(request.draft_ids)
        last = sample(logits[request.first_row + place : request.first_row + place + 1], [request.row(place)])[0]
        return last if isinstance(last, str) else [*tokens, last]

    def _judge(self, row_logits: npt.NDArray[np.float32], request: Verification, place: int, draft_id: int) -> int:
        """The draft, or the token in its place."""
        target, proposed = Distribution.of(row_logits, request.params), self._proposed[request.state_slot][place]
        position = request.position + place
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
