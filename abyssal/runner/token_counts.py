"""TokenCounts: which tokens a sequence holds and how often each was generated, in arrays that grow with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.float32]


class TokenCounts:
    """Distinct tokens of one sequence, those of the prompt with a count of 0."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt_token_ids)
        self._place = {token_id: place for place, token_id in enumerate(distinct)}
        self._ids: Ids = np.array([*distinct, *[0] * 64], np.int32)
        self._counts: Counts = np.zeros(len(self._ids), np.float32)

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens were generated."""
        for token_id in token_ids:
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._ids):
                self._ids, self._counts = (
                    np.resize(self._ids, 2 * place),
                    np.append(self._counts, np.zeros_like(self._counts)),
                )
            self._ids[place] = token_id
            self._counts[place] += 1

    def with_drafted(self, token_ids: Sequence[int]) -> tuple[Ids, Counts]:
        """Ids [N] and counts [N], as if these tokens had been generated too. Not to be written to."""
        known = len(self._place)
        ids, counts = self._ids[:known], self._counts[:known]
        if not token_ids:
            return ids, counts
        counts = counts.copy()
        fresh: dict[int, int] = {}
        for token_id in token_ids:
            place = self._place.get(token_id)
            if place is None:
                fresh[token_id] = fresh.get(token_id, 0) + 1
            else:
                counts[place] += 1
        return (
            np.concatenate((ids, np.fromiter(fresh, np.int32, len(fresh)))),
            np.concatenate((counts, np.fromiter(fresh.values(), np.float32, len(fresh)))),
        )
