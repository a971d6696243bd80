"""What the drafter gives at chosen positions of a text, its chain fixed by the caller: for comparing implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..cache.storage import CacheStorage
from ..core.errors import InvalidRequest
from ..model.dspark import DraftBlock, DraftChain, DSpark


@dataclass(frozen=True)
class DraftScores:
    """Results for N anchors and blocks of B tokens.

    Attributes:
        logits: of the text, float32 [tokens, vocab].
        features_last: what the drafter observes of the last position, [3 * hidden].
        base_logits: [N, B, vocab], before the bias of the token before.
        draft_logits: [N, B, vocab], with it.
        confidence: [N, B], probabilities, no temperature applied.
    """

    logits: torch.Tensor
    features_last: torch.Tensor
    base_logits: torch.Tensor
    draft_logits: torch.Tensor
    confidence: torch.Tensor


class DraftProbe:
    """Runs the drafter whenever a text has been computed up to an anchor.

    Raises:
        InvalidRequest: for anchors or chains that do not go with the text or the model.
    """

    def __init__(
        self, drafter: DSpark, token_ids: Sequence[int], anchors: Sequence[int], previous_ids: torch.Tensor, vocab_size: int
    ) -> None:
        """`previous_ids` [N, B]: the token before each drafted one; the first is the anchor itself."""
        for anchor in anchors:
            if not 0 <= anchor < len(token_ids):
                raise InvalidRequest(
                    "anchor_positions", anchor, f"must be a position of the text, 0 to {len(token_ids) - 1}"
                )
        expected = (len(anchors), drafter.block_size)
        if tuple(previous_ids.shape) != expected:
            raise InvalidRequest("previous_ids", f"<shape {list(previous_ids.shape)}>", f"must have shape {list(expected)}")
        if previous_ids.numel() and not 0 <= int(previous_ids.min()) <= int(previous_ids.max()) < vocab_size:
            raise InvalidRequest("previous_ids", "<ids>", f"must be token ids in [0, {vocab_size - 1}]")
        self.anchors = tuple(anchors)
        self._drafter, self._token_ids = drafter, token_ids
        self._previous = previous_ids.to(torch.int32)
        self._found: dict[int, tuple[DraftBlock, DraftChain]] = {}

    @torch.inference_mode()
    def visit(self, position: int, state_slot: int, storage: CacheStorage) -> None:
        """The rows before `position` are computed."""
        for i, anchor in enumerate(self.anchors):
            if anchor == position:
                self._found[i] = self._draft(i, position, state_slot, storage)

    def scores(self, logits: torch.Tensor, features_last: torch.Tensor) -> DraftScores:
        """All results, once the whole text is computed."""
        found = [self._found[i] for i in range(len(self.anchors))]
        return DraftScores(
            logits,
            features_last,
            torch.cat([block.base_logits for block, _ in found]),
            torch.cat([chain.logits for _, chain in found]),
            torch.cat([chain.confidence.sigmoid() for _, chain in found]),
        )

    def _draft(self, i: int, position: int, state_slot: int, storage: CacheStorage) -> tuple[DraftBlock, DraftChain]:
        def choose(place: int, logits: torch.Tensor) -> torch.Tensor:
            return self._previous[i : i + 1, min(place + 1, self._drafter.block_size - 1)]

        start, slot = torch.tensor([position], dtype=torch.int32), torch.tensor([state_slot], dtype=torch.int32)
        anchor = torch.tensor([self._token_ids[position]], dtype=torch.int32)
        block = self._drafter.propose(self._drafter.batch(anchor, start, slot), storage)
        return block, self._drafter.chain(block, self._previous[i : i + 1, 0], self._drafter.block_size, choose)
