"""Simulated acceptance: the speed of a drafter of any quality, on random weights. The text means nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..core.batch import SampledToken
from .drafting import DraftRequest, Drafts
from .sampler import Sampler, SamplingRow
from .verify import CoupledAcceptance, Verification, Verified


class SimulatedAcceptance:
    """Keeps each draft with the same probability, whatever the target draws. Does all the work that a real rule does."""

    def __init__(self, sampler: Sampler, share: float) -> None:
        self._coupled, self._share = CoupledAcceptance(sampler), share
        self._random = random.Random(0)

    def draft(self, logits: torch.Tensor, slots: Sequence[int], rows: Sequence[SamplingRow], place: int) -> list[int]:
        return self._coupled.draft(logits, slots, rows, place)

    def verify(self, logits: torch.Tensor, requests: Sequence[Verification]) -> list[Verified]:
        results: list[Verified] = [[] for _ in requests]
        going, place = list(range(len(requests))), 0
        while going:
            here = [_only(requests[i], place) for i in going]
            kept = []
            for i, drawn in zip(going, self._coupled.verify(logits, here), strict=True):
                tokens, drafts = results[i], requests[i].draft_ids
                if isinstance(drawn, str) or isinstance(tokens, str):
                    results[i] = str(drawn)
                elif place < len(drafts) and self._random.random() < self._share:
                    tokens.append(SampledToken(drafts[place], drawn[0].logprobs))
                    kept.append(i)
                else:
                    tokens.append(drawn[0])
            going, place = kept, place + 1
        return results

    def confide(self, request: DraftRequest, drafts: Drafts) -> Drafts:
        """The same drafts, with the confidence that they deserve."""
        share = min(max(self._share, 1e-9), 1 - 1e-9)
        return replace(drafts, confidence=[math.log(share / (1 - share))] * len(drafts.token_ids))


def _only(request: Verification, place: int) -> Verification:
    """The row of one place, as if nothing was drafted."""
    masks = None if request.masks is None else request.masks[place:]
    return replace(request, first_row=request.first_row + place, draft_ids=(), masks=masks)
