"""Sampler: from logits to tokens, row by row independent of the rest of the batch.

LogitRules.change -> ops.adjust_logits -> ops.cut_tokens -> ops.draw_tokens -> ops.rank_tokens

Rows that no rule touches skip the first two. The draw is the highest of scaled logit plus noise (Gumbel-max), which samples
what the filters keep exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..core.batch import SampledToken, TokenLogprobs
from ..core.sampling_params import SamplingParams
from ..ops.registry import OpTable
from ..ops.sampling import Cuts, Filters
from .distribution import Distribution
from .logit_rules import LogitChange, LogitRules, TokenRoles, pack

NOT_FINITE = "the model produced logits that are not finite numbers"


@dataclass(frozen=True)
class SamplingRow:
    """How one row of logits is sampled.

    Attributes:
        position: of the token to be drawn.
        rules: of the row's request; None if its parameters need none.
        drafted: tokens of the sequence behind those that the rules know.
        mask: int32 words of a grammar, 1 allows a token; None for no grammar.
    """

    params: SamplingParams
    seed: int
    position: int
    rules: LogitRules | None = None
    drafted: tuple[int, ...] = ()
    mask: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True)
class _Prepared:
    """Rows that share a tensor of logits.

    Attributes:
        places: which of the caller's rows they are.
        index: int32 [M] into `logits`.
        masked: -inf in `logits` is a masked token.
    """

    logits: torch.Tensor
    places: list[int]
    rows: list[SamplingRow]
    index: torch.Tensor
    masked: bool


class Sampler:
    """Draws tokens with a backend's ops.

    Attributes:
        roles: ids of the vocabulary that rules know.
    """

    def __init__(self, ops: OpTable, roles: TokenRoles) -> None:
        self._ops, self.roles = ops, roles
        self._no_rules = LogitRules(SamplingParams(), roles)

    def rules_of(self, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int | None) -> LogitRules | None:
        """Rules for a request with these tokens so far, if it needs any."""
        return LogitRules(params, self.roles, token_ids, num_prompt_tokens) if LogitRules.are_needed(params) else None

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], index: Sequence[int] | None = None
    ) -> list[SampledToken | str]:
        """Draw a token for each row; a reason instead where none can be drawn.

        Args:
            logits: float32 [N, V].
            index: which row of `logits` each takes; None for one after another.
        """
        results: list[SampledToken | str] = [NOT_FINITE] * len(rows)
        for part in self._prepare(logits, rows, index, results):
            filters = filters_of([row.params for row in part.rows], part.logits.shape[1])
            cuts = self._ops.cut_tokens(part.logits, part.index, filters)
            seeds = torch.tensor([_signed(row.seed) for row in part.rows], dtype=torch.int64)
            positions = torch.tensor([row.position for row in part.rows], dtype=torch.int32)
            drawn = self._ops.draw_tokens(
                part.logits, part.index, filters.temperature, cuts, seeds, positions, part.masked
            ).tolist()
            for place, token_id in zip(part.places, drawn, strict=True):
                if token_id >= 0:
                    results[place] = SampledToken(token_id)
            self._add_logprobs(logits, index, part, cuts, results)
        return results

    def score(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], index: Sequence[int], token_ids: Sequence[int]
    ) -> list[SampledToken | str]:
        """Tokens that were drawn in another way, with the log-probabilities that their rows ask for."""
        results: list[SampledToken | str] = [SampledToken(token_id) for token_id in token_ids]
        for part in self._prepare(logits, rows, index, results):
            cuts = self._ops.cut_tokens(part.logits, part.index, filters_of([r.params for r in part.rows], logits.shape[1]))
            self._add_logprobs(logits, index, part, cuts, results)
        return results

    def logprobs(
        self, logits: torch.Tensor, index: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Raw log-probabilities of given tokens, and the most likely ones, of rows of float32 [N, V]."""
        return self._ranked(logits, index, [1.0] * len(index), token_ids, num_top)

    def distributions(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], index: Sequence[int] | None = None
    ) -> list[Distribution | str]:
        """What each row is drawn from, or why nothing can be. Arguments as in `sample`."""
        reasons: list[SampledToken | str] = [NOT_FINITE] * len(rows)
        found: dict[int, Distribution] = {}
        for part in self._prepare(logits, rows, index, reasons):
            cuts = self._ops.cut_tokens(part.logits, part.index, filters_of([r.params for r in part.rows], logits.shape[1]))
            logits_of, values, ids = part.logits.numpy(), cuts.values.tolist(), cuts.ids.tolist()
            for i, (place, row, at) in enumerate(zip(part.places, part.rows, part.index.tolist(), strict=True)):
                own = logits_of[at]
                if own.max() < np.inf and (part.masked or own.min() > -np.inf):
                    kept = (own > values[i]) | ((own == values[i]) & (np.arange(len(own)) <= ids[i]))
                    found[place] = Distribution.of(np.where(kept, own, np.float32(-np.inf)), row.params)
        return [found.get(place) or str(reason) for place, reason in enumerate(reasons)]

    def _prepare(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        index: Sequence[int] | None,
        results: list[SampledToken | str],
    ) -> list[_Prepared]:
        """Rows as they are, and rows that rules changed; reasons of those that fail go into `results`."""
        where = range(len(rows)) if index is None else index
        plain: list[int] = []
        changed: list[int] = []
        changes: list[LogitChange] = []
        for place, row in enumerate(rows):
            change = self._change(row)
            if change is None:
                plain.append(place)
            elif isinstance(change, str):
                results[place] = change
            else:
                changed.append(place)
                changes.append(change)
        parts = []
        if plain:
            at = torch.tensor([where[place] for place in plain], dtype=torch.int32)
            parts.append(_Prepared(logits, plain, [rows[place] for place in plain], at, masked=False))
        if changed:
            at = torch.tensor([where[place] for place in changed], dtype=torch.int32)
            adjusted = self._ops.adjust_logits(logits, at, pack(changes, logits.shape[1]))
            at = torch.arange(len(changed), dtype=torch.int32)
            parts.append(_Prepared(adjusted, changed, [rows[place] for place in changed], at, masked=True))
        return parts

    def _change(self, row: SamplingRow) -> LogitChange | str | None:
        rules = row.rules
        if rules is None and row.mask is not None:
            rules = self._no_rules
        return None if rules is None else rules.change(row.drafted, row.mask)

    def _add_logprobs(
        self,
        logits: torch.Tensor,
        index: Sequence[int] | None,
        part: _Prepared,
        cuts: Cuts,
        results: list[SampledToken | str],
    ) -> None:
        """Add log-probabilities to the tokens of a part: raw ones of the model's logits, processed ones of what is kept."""
        raw, processed = (_wanted(part, results, mode) for mode in ("raw", "processed"))
        if raw:
            at = [part.places[i] for i in raw]
            self._rank(part, raw, logits, at if index is None else [index[place] for place in at], [1.0] * len(raw), results)
        if processed:
            kept = self._kept_logits(part, cuts, processed)
            params = [part.rows[i].params for i in processed]
            # greedy rows are scored as at temperature 1
            temperature = [1.0 if p.is_greedy else p.temperature for p in params]
            self._rank(part, processed, kept, range(len(processed)), temperature, results)

    def _kept_logits(self, part: _Prepared, cuts: Cuts, chosen: Sequence[int]) -> torch.Tensor:
        """float32 [chosen, V] with -inf for tokens that were cut off."""
        out = part.logits[part.index[list(chosen)].long()]
        for row, i in zip(out.numpy(), chosen, strict=True):  # one at a time: it stays in the cache
            value, tail = np.float32(cuts.values[i]), row[int(cuts.ids[i]) + 1 :]
            np.copyto(row, -np.inf, where=row < value)
            np.copyto(tail, -np.inf, where=tail == value)
        return out

    def _rank(
        self,
        part: _Prepared,
        chosen: Sequence[int],
        logits: torch.Tensor,
        index: Sequence[int],
        temperature: Sequence[float],
        results: list[SampledToken | str],
    ) -> None:
        """Add to the chosen rows' tokens what `logits[index]` says of them."""
        tokens = [_token(results[part.places[i]]) for i in chosen]
        num_top = [part.rows[i].params.logprobs or 0 for i in chosen]
        entries = self._ranked(logits, index, temperature, tokens, num_top)
        for i, token_id, entry in zip(chosen, tokens, entries, strict=True):
            results[part.places[i]] = SampledToken(token_id, entry)

    def _ranked(
        self,
        logits: torch.Tensor,
        index: Sequence[int],
        temperature: Sequence[float],
        token_ids: Sequence[int],
        num_top: Sequence[int],
    ) -> list[TokenLogprobs]:
        columns = self._ops.rank_tokens(
            logits,
            torch.tensor(list(index), dtype=torch.int32),
            torch.tensor(temperature, dtype=torch.float64),
            torch.tensor(token_ids, dtype=torch.int64),
            min(max(num_top, default=0), logits.shape[1]),
        )
        entries = []
        for token_id, count, chosen, rank, best, best_logprobs in zip(
            token_ids, num_top, *(column.tolist() for column in columns), strict=True
        ):
            pairs = zip(best[:count], best_logprobs[:count], strict=True)
            top = tuple((i, value) for i, value in pairs if value > -math.inf)
            entries.append(TokenLogprobs(token_id, chosen, rank, top))
        return entries


def filters_of(params: Sequence[SamplingParams], vocab_size: int) -> Filters:
    """The filters of rows with these parameters."""
    return Filters(
        temperature=torch.tensor([0.0 if p.is_greedy else p.temperature for p in params], dtype=torch.float64),
        top_k=torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
        min_log_ratio=torch.tensor([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], dtype=torch.float64),
        joint=torch.tensor([p.top_k_top_p == "joint" for p in params]),
    )


def _wanted(part: _Prepared, results: Sequence[SampledToken | str], mode: str) -> list[int]:
    """Rows of a part that have a token and want its log-probabilities of this kind."""
    return [
        i
        for i, (place, row) in enumerate(zip(part.places, part.rows, strict=True))
        if row.params.logprobs is not None and row.params.logprobs_mode == mode and not isinstance(results[place], str)
    ]


def _token(result: SampledToken | str) -> int:
    assert isinstance(result, SampledToken), "only rows with a token have log-probabilities"
    return result.token_id


def _signed(seed: int) -> int:
    """The 64 bits of a seed as a signed number."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >> 63 else seed
