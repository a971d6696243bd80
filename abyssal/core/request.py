"""A request inside the engine and the states it may pass through."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is. `TRANSITIONS` lists every legal move."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class RowSchedule:
    """How the rows of one request are cut into steps, where a caller fixes that rather than the token budget.

    Attributes:
        chunk: most rows of this request in one step.
        decode_from: positions from here on are fed one a step.
        cuts: positions at which a step begins.
    """

    chunk: int | None = None
    decode_from: int | None = None
    cuts: tuple[int, ...] = ()

    def limit(self, start: int, rows: int) -> int:
        """How many of `rows` rows beginning at position `start` may run in one step (>= 1)."""
        if self.decode_from is not None:
            rows = 1 if start >= self.decode_from else min(rows, self.decode_from - start)
        rows = min(rows, *(cut - start for cut in self.cuts if cut > start), rows)
        return rows if self.chunk is None else min(rows, self.chunk)


@dataclass(eq=False)
class Request:
    """One sequence. The scheduler is the only writer of status, counts and output.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_token_ids: at least one id.
        params: immutable.
        seed: 64-bit seed of this sequence's noise, drawn from `params.seed` or at random.
        max_total_tokens: prompt plus output may not exceed this.
        eos_token_ids: ids that end it unless `params.ignore_eos`.
        row_schedule: see `RowSchedule`.
        wants_prompt_logits: every prompt row's logits are computed, not only the last one's.
        constraint: what its output has to satisfy, for the runner; its end is an end before `min_tokens` too.
        arrival: order of arrival, unique and increasing; also the order after preemption.
        num_computed_tokens: leading tokens whose state lies in the caches, or will when the scheduled steps have run.
        output_token_ids: tokens generated so far.
        finish_reason, stop_reason, error: set once, on finishing.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    row_schedule: RowSchedule = RowSchedule()
    wants_prompt_logits: bool = False
    constraint: object | None = None
    arrival: int = 0
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def token_ids(self) -> list[int]:
        """Prompt and output in one list."""
        return self.prompt_token_ids + self.output_token_ids

    def move_to(self, status: RequestStatus) -> None:
        """Change the status along a legal transition."""
        assert status in TRANSITIONS[self.status], f"request {self.request_id}: {self.status} -> {status} is no transition"
        self.status = status

    def end_earlier(self, num_output_tokens: int, stop_reason: int | str) -> None:
        """A finished request had ended before: its text ran into a stop string at an earlier token of its last step."""
        assert self.is_finished, f"request {self.request_id} has not ended; the scheduler stops it"
        del self.output_token_ids[num_output_tokens:]
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop_reason

    def finish(self, reason: FinishReason, *, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """End the request with its reason."""
        self.move_to(RequestStatus.FINISHED)
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
