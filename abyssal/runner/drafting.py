"""Drafting: runs the drafter for the requests of a step and draws their drafts by the acceptance rule in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..core.batch import DraftBatch, ForwardBatch
from ..core.sampling_params import SamplingParams
from ..model.common import Caches
from ..model.dspark import DraftBlock, DraftChain
from .constraints import DraftWalk
from .logit_rules import LogitRules
from .resolve import DraftSplit
from .sampler import SamplingRow
from .verify import AcceptanceRule, without_logprobs

CERTAIN = 20.0
"""Logit of the confidence in a draft that is the only token its grammar allows."""


class DraftModel(Protocol):
    """What is asked of a drafter; see `DSpark`."""

    block_size: int

    def observe(self, features: torch.Tensor, batch: ForwardBatch, caches: Caches) -> None: ...
    def batch(self, anchor_ids: torch.Tensor, block_start: torch.Tensor, state_slot: torch.Tensor) -> DraftBatch: ...
    def propose(self, batch: DraftBatch, caches: Caches) -> DraftBlock: ...
    def chain(
        self, block: DraftBlock, anchor_ids: torch.Tensor, length: int, choose: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> DraftChain: ...


@dataclass(frozen=True)
class DraftRequest:
    """A request that wants drafts.

    Attributes:
        anchor_id: its newest token.
        position: of the anchor.
        length: tokens to draft, at least one.
        rules: of the request, if it needs any.
    """

    request_id: str
    state_slot: int
    anchor_id: int
    position: int
    length: int
    params: SamplingParams
    seed: int
    rules: LogitRules | None = None


@dataclass(frozen=True)
class Drafts:
    """Drafted tokens of one request and the logits of their confidences."""

    token_ids: list[int]
    confidence: list[float]


Oracle = Callable[[DraftRequest, Drafts], Drafts]
"""Replaces what was drafted (tests, simulated acceptance)."""


class Drafting:
    """A drafter and an acceptance rule.

    Args:
        split: decides whose drafts are verified where not all can be.

    Attributes:
        oracle: None, or what replaces each draft.
    """

    def __init__(self, model: DraftModel, rule: AcceptanceRule, split: DraftSplit | None = None) -> None:
        self.model, self.rule, self.split = model, rule, split
        self.oracle: Oracle | None = None

    def draft(self, requests: Sequence[DraftRequest], caches: Caches, walk: DraftWalk | None = None) -> list[Drafts]:
        """Draft for all requests in one pass.

        Args:
            walk: of the requests' grammars, under which drafts are drawn as their tokens will be; None if they have none.
        """
        anchors = torch.tensor([r.anchor_id for r in requests], dtype=torch.int32)
        starts = torch.tensor([r.position for r in requests], dtype=torch.int32)
        slots = [r.state_slot for r in requests]
        block = self.model.propose(self.model.batch(anchors, starts, torch.tensor(slots, dtype=torch.int32)), caches)
        params = [without_logprobs(r.params) for r in requests]
        chains: list[list[int]] = [[] for _ in requests]

        def choose(place: int, logits: torch.Tensor) -> torch.Tensor:
            masks = [None] * len(requests) if walk is None else walk.masks()
            rows = [
                SamplingRow(own, r.seed, r.position + 1 + place, r.rules, tuple(drafted), mask)
                for own, r, drafted, mask in zip(params, requests, chains, masks, strict=True)
            ]
            ids = self.rule.draft(logits, slots, rows, place)
            for drafted, token_id in zip(chains, ids, strict=True):
                drafted.append(token_id)
            if walk is not None:
                walk.advance(ids)
            return torch.tensor(ids, dtype=torch.int32)

        chain = self.model.chain(block, anchors, max(r.length for r in requests), choose)
        ids, confidence = chain.token_ids.tolist(), chain.confidence.nan_to_num(nan=-torch.inf).tolist()
        if walk is not None:
            confidence = [_with_certainty(own, sure) for own, sure in zip(confidence, walk.certain, strict=True)]
        drafts = [
            Drafts(own_ids[: r.length], own[: r.length]) for r, own_ids, own in zip(requests, ids, confidence, strict=True)
        ]
        if self.oracle is not None:
            drafts = [self.oracle(request, own) for request, own in zip(requests, drafts, strict=True)]
        return drafts


def _with_certainty(confidence: Sequence[float], certain: Sequence[bool]) -> list[float]:
    return [CERTAIN if sure else own for own, sure in zip(confidence, certain, strict=True)]
