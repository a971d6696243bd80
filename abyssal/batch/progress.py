"""How far a job is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchProgress:
    """A snapshot of a job, running or ended.

    Attributes:
        total: lines of the input that are not blank.
        done: answered so far, in earlier runs too.
        resumed: of these, answered in earlier runs.
        failed: of these, answered by an error.
        tokens_in, tokens_out: prompt rows computed and tokens drawn in this run.
        running, waiting: requests in the engine.
        hit_rate: share of prompt tokens found in the prefix cache, 0 to 1; None if the engine does not say.
        elapsed: seconds of this run.
        is_stopping: nothing new is begun.
    """

    total: int
    done: int
    resumed: int
    failed: int
    tokens_in: int
    tokens_out: int
    running: int
    waiting: int
    hit_rate: float | None
    elapsed: float
    is_stopping: bool

    @property
    def is_complete(self) -> bool:
        """Whether every line has its answer."""
        return self.done == self.total

    @property
    def eta(self) -> float | None:
        """Seconds left at the mean speed of this run; None before the first answer."""
        fresh = self.done - self.resumed
        return self.elapsed * (self.total - self.done) / fresh if fresh > 0 else None
