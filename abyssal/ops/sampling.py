"""From logits to tokens. Each row is worked on by itself; which rows share a call changes nothing.

The order of tokens is total: a higher logit first, the lower id among equals. Filters keep a prefix of it, so that a *cut*,
the last token kept, says all about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

MASS_ONE = 1 << 44
"""What the most likely token weighs in sums over probabilities. All weigh whole numbers, whose sums have no order."""


@dataclass(frozen=True)
class LogitAdjustments:
    """What is done to M rows of logits before temperature. No row has an id twice.

    Attributes:
        rows, ids: int32 [E], where; `rows` counts within the M rows, ascending.
        divisor: float32 [E], divides positive and multiplies negative logits.
        minus: float32 [E], subtracted after that.
        plus: float32 [E], added last.
        masked: int32 [A], which of the M rows have a mask.
        masks: int32 [A, words], bit v & 31 of word v >> 5 is 1 where token v is allowed; what lies past it is not.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    divisor: torch.Tensor
    minus: torch.Tensor
    plus: torch.Tensor
    masked: torch.Tensor
    masks: torch.Tensor


@dataclass(frozen=True)
class Filters:
    """Which tokens of M rows may be drawn.

    Attributes:
        temperature: float64 [M], 0 for greedy rows.
        top_k: int32 [M], at least 1; the size of the vocabulary or more for no limit.
        top_p: float64 [M], in (0, 1].
        min_log_ratio: float64 [M], logarithm of min_p; -inf for none.
        joint: bool [M]; top-p of all tokens that min-p kept, rather than of those that top-k kept.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_log_ratio: torch.Tensor
    joint: torch.Tensor


@dataclass(frozen=True)
class Cuts:
    """The last token kept in each of M rows: token v is kept iff its logit is above `values`, or equal and v <= `ids`.

    Attributes:
        values: float32 [M], -inf where only masked tokens are left out.
        ids: int32 [M].
    """

    values: torch.Tensor
    ids: torch.Tensor


class AdjustLogits(Protocol):
    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, adjustments: LogitAdjustments) -> torch.Tensor:
        """Some rows of logits, adjusted: finite ones stay finite, forbidden tokens get -inf.

        Logits that were no finite numbers become NaN, forbidden or not.

        Args:
            logits: float32 [N, V].
            rows: int32 [M] into `logits`.

        Returns:
            A new float32 [M, V].
        """
        ...


class CutTokens(Protocol):
    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, filters: Filters) -> Cuts:
        """Where the filters cut off the tokens of each row; at least one is kept.

        With z = logit / temperature in float64 and z0 the highest of them: min-p keeps z >= z0 + min_log_ratio; top-k
        the first k of those; top-p the shortest prefix whose mass reaches top_p times the total. The mass of a token is
        the whole part of MASS_ONE * exp(z - z0), so that beyond a ratio of 2^-44 it is 0. A token is kept iff the mass
        before it is less than top_p times the total (in float64, rounded up). Greedy rows, and rows that are no numbers,
        get any cut.

        Args:
            logits: float32 [N, V], -inf for masked tokens.
            rows: int32 [M] into `logits`.
        """
        ...


class DrawTokens(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        cuts: Cuts,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        masked: bool,
    ) -> torch.Tensor:
        """Draw a token of each row: the highest logit / temperature + noise among those kept, the lowest id among equals.

        The noise is `core.noise.gumbel` of (seed, position, id), bit for bit. Greedy rows take the highest logit.

        Args:
            logits: float32 [N, V].
            rows: int32 [M] into `logits`.
            temperature: float64 [M], 0 for greedy.
            seeds: int64 [M], the bits of unsigned ones.
            positions: int32 [M].
            masked: -inf stands for masked tokens. Otherwise it is no number, as NaN and +inf never are.

        Returns:
            int64 [M]; -1 where a logit is not a number or no token is left.
        """
        ...


class RankTokens(Protocol):
    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of chosen tokens and of the most likely ones: log-softmax of logit / temperature.

        Args:
            logits: float32 [N, V], finite or -inf; other rows get NaN, rank 0 and ids of -1.
            rows: int32 [M] into `logits`.
            temperature: float64 [M], above 0.
            ids: int64 [M], the chosen ones.
            num_top: K <= V.

        Returns:
            of the chosen: log-probability float32 [M], rank int32 [M] from 1; of the best: ids int32 [M, K], best first, and
            log-probabilities float32 [M, K].
        """
        ...
