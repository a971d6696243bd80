"""What a scheduler could decide otherwise: who waits where, who has to yield, how much is kept free, who never fits.

First come, first served. Requests run in the order of their arrival, and nobody overtakes: a prompt too large for what is
free now makes those behind it wait too. The request that has to yield is the latest arrival, so the oldest is never sent
back, and since it fits, it ends; then the next one is the oldest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from ..config.engine import BLOCK_TOKENS
from ..core.request import Request

GROWTH_TOKENS = 16
"""Tokens by which each running request should be able to grow before a newly admitted one costs somebody a recompute."""


class ArrivalQueue:
    """Requests that wait, in order of arrival. Every operation takes constant time."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request) -> None:
        """Add a request that arrived after all others."""
        self._requests[request.request_id] = request

    def push_back(self, request: Request) -> None:
        """Return a request that arrived before all that wait."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def head(self) -> Request:
        """The request whose turn is next; it stays in the queue."""
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands."""
        del self._requests[request.request_id]


def choose_victim(running: Iterable[Request]) -> Request:
    """Who yields its blocks when none are free: the latest arrival."""
    return max(running, key=lambda request: request.arrival)


def headroom_blocks(num_running: int) -> int:
    """Blocks that an admission leaves free for the growth of those who run already; none if nobody does."""
    return -(-num_running * GROWTH_TOKENS // BLOCK_TOKENS)


def max_total_tokens(request: Request, capacity_tokens: int) -> int:
    """Prompt and output together. One token may lie beyond the cache: the last one, which nothing follows."""
    return min(request.max_total_tokens, capacity_tokens + 1)


def reaches_limit(request: Request, num_more: int, capacity_tokens: int) -> bool:
    """Whether a request of so many more tokens has all that it may have."""
    return request.num_tokens + num_more >= _most_tokens(request, capacity_tokens)


def _most_tokens(request: Request, capacity_tokens: int) -> int:
    most = max_total_tokens(request, capacity_tokens)
    max_tokens = request.params.max_tokens
    return most if max_tokens is None else min(most, request.num_prompt_tokens + max_tokens)


def most_drafts(request: Request, num_tokens: int, capacity_tokens: int) -> int:
    """Drafts that are of use to a request when it has `num_tokens` tokens: a step draws one token more than it accepts."""
    left = _most_tokens(request, capacity_tokens) - num_tokens - 1
    return request.row_schedule.limit(num_tokens - 1, 1 + left) - 1 if left > 0 else 0


def why_never_fits(request: Request, capacity_tokens: int) -> str | None:
    """The reason why a request could not run even alone, or None.

    A request that wants the logits of its prompt may fill its length with the prompt; others need room for one token more.
    """
    num_tokens = request.num_prompt_tokens
    if num_tokens == 0:
        return "the prompt has no tokens; at least one is needed"
    limit = request.max_total_tokens if request.wants_prompt_logits else request.max_total_tokens - 1
    if num_tokens > limit:
        return (
            f"the prompt has {num_tokens} tokens, but prompt and output together may have {request.max_total_tokens}; "
            f"shorten the prompt or raise max_model_len"
        )
    if num_tokens > capacity_tokens:
        return (
            f"the prompt has {num_tokens} tokens, but the cache holds {capacity_tokens} "
            f"({capacity_tokens // BLOCK_TOKENS} blocks of {BLOCK_TOKENS}); shorten the prompt or raise num_blocks"
        )
    return None
