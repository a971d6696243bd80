"""Continuous batching: each step takes rows of every request that can go on, within a budget of rows.

    add -> WAITING -> schedule -> RUNNING -> update -> FINISHED
                         ^           | no block is free and it arrived last
                         +-- PREEMPTED (its blocks are given back; prompt and output so far will be computed again)

`schedule` decides a step, a runner computes it, `update` takes the results. A step is filled in three passes:

1. one row for each running request that has one known token left to compute. If such a request needs a block and none is
   free, the latest arrival yields: itself, or one that this step has not come to yet. Behind its own row come rows that
   verify drafted tokens, as many as `speculation` grants;
2. the next chunk of each running request that is still inside its known tokens, oldest first;
3. chunks of waiting requests, in order of arrival, as long as rows, slots and blocks last. A request is admitted only if
   blocks for all its known tokens are free, and takes them all: a prompt never gets stuck half-way.

Running requests therefore are older than all that wait, and the oldest request advances in each step until it ends.

**Scheduling ahead.** `schedule` may be called again before `update` of the step before. `num_computed_tokens` advances in
`schedule`, so it counts rows of steps that have not come back yet, and a request is taken to have all tokens that these may
draw, as if every draft were accepted: its next row is planned at the last place where it may lie, with blocks up to there,
and the runner, which knows the tokens, moves it to where it belongs. A request that turns out to have ended has a row too
many in the step that is out already, whose result nobody takes. Steps must be run in the order in which they were scheduled,
and updated in that order; ids that were given back may then be handed out at once, for the step that takes them over runs
after the one that still wrote to them.

**Drafts.** The runner holds drafted tokens for a slot; the scheduler knows how many there are or will be. Rows that verify
them count as computed like any other, and `update` sets the count back to what was accepted: rows beyond it are written
again by the next step, and nobody reads them before. A row for a draft never costs another request its place: it takes rows
that are left over and blocks that are free. Each request gets places for all its drafts, the step a total of how many to
verify; the runner splits it.

**Late results.** Each stay of a request among the running ones has a number, the epoch, which its rows carry. Results whose
epoch is not that of a running request are dropped: the request has ended or was preempted in the meantime, and a token
dropped so is drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cache.manager import CacheManager
from ..core.batch import RunnerOutput, ScheduledRows, SchedulerOutput, SlotAssignment
from ..core.errors import InvalidRequest
from ..core.request import FinishReason, Request, RequestStatus
from .policy import (
    ArrivalQueue,
    choose_victim,
    headroom_blocks,
    max_total_tokens,
    most_drafts,
    reaches_limit,
    why_never_fits,
)
from .speculation import Proposal, Speculation
from .stopping import check_stop


@dataclass(eq=False, slots=True)
class _Stay:
    """One stay of a request among the running ones.

    Attributes:
        num_blocks: length of the block table that the runner knows.
        drafts: confidence logits of the newest drafts that came back.
        earlier_drafts: those of the drafts before, which were judged.
        num_drawing: steps that are out and draw a token.
        num_unjudged: drafts whose rows count as computed and were not judged yet.
        num_ordered: drafts that the newest of those steps will make.
    """

    request: Request
    epoch: int
    state_slot: int
    num_blocks: int = 0
    drafts: tuple[float, ...] = ()
    earlier_drafts: tuple[float, ...] = ()
    num_drawing: int = 0
    num_unjudged: int = 0
    num_ordered: int = 0

    @property
    def most_tokens(self) -> int:
        """Tokens once all steps are back, if every draft is accepted."""
        return self.request.num_tokens + self.num_drawing + self.num_unjudged


@dataclass(slots=True)
class _Step:
    """A step being filled; `budget` is how many rows may still be added, `draft_rows` how many drafts it verifies."""

    budget: int
    assignments: list[SlotAssignment] = field(default_factory=list)
    rows: list[ScheduledRows] = field(default_factory=list)
    draft_rows: int = 0


class Scheduler:
    """Requests on their way through the engine.

    Not thread-safe. Sole writer of status, counts and output tokens of the requests it was given.

    Args:
        cache_manager: where blocks and state slots come from; nobody else takes any.
        max_num_seqs: requests running at a time; fewer if the row budget is smaller, so that each can decode in every step.
        max_num_batched_tokens: rows of one step.

    Attributes:
        speculation: None, or what decides on drafts; may be exchanged while no request runs.
    """

    def __init__(
        self,
        cache_manager: CacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        speculation: Speculation | None = None,
    ) -> None:
        assert max_num_seqs > 0, f"max_num_seqs={max_num_seqs} leaves nothing to run"
        assert max_num_batched_tokens > 0, f"max_num_batched_tokens={max_num_batched_tokens} leaves nothing to run"
        self._cache = cache_manager
        self._max_running = min(max_num_seqs, max_num_batched_tokens)
        self._max_rows = max_num_batched_tokens
        self._waiting = ArrivalQueue()
        self._running: dict[str, _Stay] = {}
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0
        self._num_epochs = 0
        self._num_preemptions = 0
        self.speculation = speculation

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step or, preempted, for another one."""
        return len(self._waiting)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._num_preemptions

    def add(self, request: Request) -> None:
        """Take over a new request and number its arrival.

        One that could never run ends at once, in error: look at `request.is_finished` afterwards.

        Raises:
            InvalidRequest: if an unfinished request has the same id.
        """
        if request.request_id in self._requests:
            raise InvalidRequest("request_id", request.request_id, "is taken by an unfinished request; choose another")
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        reason = why_never_fits(request, self._cache.capacity_tokens)
        if reason is not None:
            request.finish(FinishReason.ERROR, error=reason)
            return
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state it is. Returns it, or None if no unfinished request has that id."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        return request

    def stop(
        self, request_id: str, stop_reason: int | str | None = None, *, num_output_tokens: int | None = None
    ) -> Request | None:
        """End a request because of what it has written, as a stop string does. Returns as `abort` does.

        Args:
            num_output_tokens: with which of its tokens it ends, if not with the last; later ones are dropped.
        """
        request = self._requests.get(request_id)
        if request is not None:
            if num_output_tokens is not None:
                del request.output_token_ids[num_output_tokens:]
            self._finish(request, FinishReason.STOP, stop_reason=stop_reason)
        return request

    def schedule(self) -> SchedulerOutput:
        """Decide the next step and count its rows as computed. It has no rows if nothing can advance."""
        step = _Step(self._max_rows)
        self._schedule_decodes(step)
        self._schedule_chunks(step)
        self._admit(step)
        self._want_drafts(step)
        observes = self.speculation is not None and self.speculation.observes
        return SchedulerOutput(tuple(step.assignments), tuple(step.rows), step.draft_rows, observes)

    def update(self, scheduler_output: SchedulerOutput, runner_output: RunnerOutput) -> list[Request]:
        """Take the results of a step: append tokens, end requests that stop or failed, give back what they held.

        Returns:
            The requests whose results counted, in the order of the rows: each got tokens, ended, or moved on inside its
            known tokens. Results of a request that is not listed came too late and must not be used.
        """
        accepted = []
        for rows in scheduler_output.rows:
            stay = self._running.get(rows.request_id)
            if stay is None or stay.epoch != rows.epoch:
                continue
            request = stay.request
            if rows.request_id in runner_output.errors:
                self._finish(request, FinishReason.ERROR, error=runner_output.errors[rows.request_id])
            elif rows.samples:
                self._append(stay, rows, runner_output)
            accepted.append(request)
        if self.speculation is not None and runner_output.timing is not None:
            self.speculation.observe(runner_output.timing, scheduler_output, runner_output)
        return accepted

    def check_integrity(self) -> None:
        """Check queues and caches against each other. For tests and for debugging.

        Raises:
            AssertionError: naming what is wrong.
        """
        self._cache.check_integrity()
        running, waiting = [stay.request for stay in self._running.values()], list(self._waiting)
        arrivals = [request.arrival for request in running + waiting]
        assert arrivals == sorted(set(arrivals)), f"{len(running)} run, the rest waits, out of order of arrival: {arrivals}"
        assert {r.request_id: r for r in running + waiting} == self._requests, "a request is in no queue, or in two"
        assert len(running) <= self._max_running, f"{len(running)} requests run, {self._max_running} may"
        for stay in self._running.values():
            self._check_running(stay)
        for request in waiting:
            self._check_waiting(request)

    def _check_running(self, stay: _Stay) -> None:
        request, request_id = stay.request, stay.request.request_id
        assert request.status is RequestStatus.RUNNING, f"request {request_id} runs, but its status is {request.status}"
        assert request.num_computed_tokens <= stay.most_tokens, f"request {request_id} is ahead of its own tokens"
        assert self._cache.slot(request_id) == stay.state_slot, f"request {request_id} lost slot {stay.state_slot}"
        num_blocks = len(self._cache.blocks(request_id))
        assert num_blocks == stay.num_blocks, f"request {request_id} holds {num_blocks} blocks, {stay.num_blocks} were sent"

    def _check_waiting(self, request: Request) -> None:
        request_id, states = request.request_id, (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert request.status in states, f"request {request_id} waits, but its status is {request.status}"
        assert request.num_computed_tokens == 0, (
            f"request {request_id} waits with {request.num_computed_tokens} rows computed"
        )
        assert self._cache.slot(request_id) is None, f"request {request_id} waits, but holds a slot"
        assert not self._cache.blocks(request_id), f"request {request_id} waits, but holds blocks"

    def _schedule_decodes(self, step: _Step) -> None:
        decoding: list[tuple[_Stay, tuple[int, ...]]] = []
        for stay in tuple(self._running.values()):
            request = stay.request
            is_preempted = request.status is not RequestStatus.RUNNING
            if is_preempted or stay.most_tokens - request.num_computed_tokens != 1 or self._ends_for_sure(stay):
                continue
            block_ids = self._grow(stay)
            if block_ids is not None:
                decoding.append((stay, block_ids))
        places = [self._draft_places(stay) for stay, _ in decoding]
        step.draft_rows = self._draft_total(decoding, places, step.budget - len(decoding)) if any(places) else 0
        for (stay, block_ids), num_places in zip(decoding, places, strict=True):
            num_drafts = min(num_places, step.draft_rows)
            more_ids = self._blocks_for(stay, num_drafts) if num_drafts else ()
            self._add_rows(step, stay, block_ids + (more_ids or ()), num_drafts if more_ids is not None else 0)
        step.draft_rows = min(step.draft_rows, sum(rows.num_drafts for rows in step.rows))
        step.budget -= step.draft_rows

    def _ends_for_sure(self, stay: _Stay) -> bool:
        """Whether the steps that are out bring a request to its limit, whatever they draw."""
        return stay.num_drawing > 0 and reaches_limit(stay.request, stay.num_drawing, self._cache.capacity_tokens)

    def _draft_places(self, stay: _Stay) -> int:
        """How many drafts there will be for a request's next row, as far as they are of use."""
        at_hand = stay.num_ordered if stay.num_drawing else len(stay.drafts)
        least_tokens = stay.request.num_tokens + stay.num_drawing
        return min(at_hand, most_drafts(stay.request, least_tokens, self._cache.capacity_tokens)) if at_hand else 0

    def _draft_total(self, decoding: Sequence[tuple[_Stay, object]], places: Sequence[int], room: int) -> int:
        """How many drafts to verify, `room` rows being left for them."""
        assert self.speculation is not None, "there are drafts, but nothing decides on them"
        proposals = []
        for (stay, _), most in zip(decoding, places, strict=True):
            # what came back last was made before the drafts at hand, if a step is out that makes these
            proposals.append(Proposal(stay.drafts if stay.num_drawing else stay.earlier_drafts, most))
        return self.speculation.total(proposals, min(self._prompt_rows(), room), room)

    def _prompt_rows(self) -> int:
        """Rows of known tokens that wait to be computed beside the decoding requests', as far as they are admitted."""
        requests = (stay.request for stay in self._running.values())
        missing = (request.num_tokens - request.num_computed_tokens for request in requests)
        num_rows = sum(count for count in missing if count > 1)
        if self._waiting and len(self._running) < self._max_running:
            num_rows += self._waiting.head().num_tokens
        return num_rows

    def _want_drafts(self, step: _Step) -> None:
        """Order drafts for the requests that draw a token in this step."""
        drawing = [i for i, rows in enumerate(step.rows) if rows.samples]
        if self.speculation is None or not drawing:
            return
        most = []
        for i in drawing:
            stay = self._running[step.rows[i].request_id]
            num_tokens = stay.request.num_tokens + stay.num_drawing
            most.append(most_drafts(stay.request, num_tokens, self._cache.capacity_tokens))
        room = self._max_rows - len(drawing)
        wanted = self.speculation.wanted(most, min(self._prompt_rows(), room), room)
        for i, count in zip(drawing, wanted, strict=True):
            self._running[step.rows[i].request_id].num_ordered = count
            if count:
                step.rows[i] = step.rows[i]._replace(drafts_wanted=count)

    def _schedule_chunks(self, step: _Step) -> None:
        for stay in self._running.values():
            if step.budget == 0:
                return
            if stay.request.num_computed_tokens < stay.request.num_tokens:
                self._add_rows(step, stay, ())

    def _admit(self, step: _Step) -> None:
        while step.budget > 0 and self._waiting and len(self._running) < self._max_running:
            request = self._waiting.head()
            headroom = headroom_blocks(len(self._running))
            if not self._cache.can_admit(request, request.num_tokens, headroom_blocks=headroom):
                return
            self._waiting.remove(request)
            stay, block_ids = self._start(request)
            step.assignments.append(_assignment(stay))
            self._add_rows(step, stay, block_ids)

    def _start(self, request: Request) -> tuple[_Stay, tuple[int, ...]]:
        """Move a request that can be admitted among the running ones, with blocks for all its known tokens."""
        block_ids = self._cache.allocate(request.request_id, request.num_tokens)
        assert block_ids is not None, f"request {request.request_id} was admitted without enough free blocks"
        stay = _Stay(request, self._num_epochs, self._cache.assign_slot(request.request_id))
        self._num_epochs += 1
        self._running[request.request_id] = stay
        request.move_to(RequestStatus.RUNNING)
        return stay, block_ids

    def _grow(self, stay: _Stay) -> tuple[int, ...] | None:
        """Blocks for a request's next row, taken from later arrivals if need be; None if it had to yield itself."""
        while (block_ids := self._blocks_for(stay)) is None:
            victim = choose_victim(stay.request for stay in self._running.values())
            self._preempt(victim)
            if victim is stay.request:
                return None
        return block_ids

    def _blocks_for(self, stay: _Stay, num_drafts: int = 0) -> tuple[int, ...] | None:
        """Blocks up to a request's next row and so many behind it, if enough are free. Beyond the pool no row counts."""
        num_tokens = min(stay.most_tokens + num_drafts, self._cache.capacity_tokens)
        return self._cache.allocate(stay.request.request_id, num_tokens)

    def _preempt(self, request: Request) -> None:
        """Send a request back to the head of the queue. It keeps its output, which is computed again with its prompt."""
        self._cache.free(request.request_id)
        del self._running[request.request_id]
        request.move_to(RequestStatus.PREEMPTED)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.push_back(request)

    def _add_rows(self, step: _Step, stay: _Stay, block_ids: tuple[int, ...], num_drafts: int = 0) -> None:
        request = stay.request
        start, most_tokens = request.num_computed_tokens, stay.most_tokens
        num_known = request.row_schedule.limit(start, min(most_tokens - start, step.budget))
        num_rows = num_known + num_drafts
        samples = start + num_known == most_tokens
        step.budget -= num_known
        request.num_computed_tokens = start + num_rows
        stay.num_unjudged += num_drafts
        stay.num_drawing += samples
        stay.num_ordered = 0
        step.rows.append(
            ScheduledRows(
                request_id=request.request_id,
                state_slot=stay.state_slot,
                start=start,
                num_rows=num_rows,
                first_new_block=stay.num_blocks,
                new_block_ids=block_ids,
                samples=samples,
                num_drafts=num_drafts,
                epoch=stay.epoch,
            )
        )
        stay.num_blocks += len(block_ids)

    def _append(self, stay: _Stay, rows: ScheduledRows, runner_output: RunnerOutput) -> None:
        request = stay.request
        sampled = runner_output.sampled.get(request.request_id)
        assert sampled, f"the runner drew no token for request {request.request_id} and reported no error"
        self._judge(stay, rows, len(sampled) - 1, runner_output)
        limit = max_total_tokens(request, self._cache.capacity_tokens)
        for token in sampled:
            request.output_token_ids.append(token.token_id)
            end = check_stop(request, limit)
            if end is not None:
                reason, stop_reason = end
                self._finish(request, reason, stop_reason=stop_reason)
                return

    def _judge(self, stay: _Stay, rows: ScheduledRows, num_accepted: int, runner_output: RunnerOutput) -> None:
        """Set the computed rows back to what was accepted, and note the drafts that the step has made."""
        request_id = stay.request.request_id
        next_drafts = runner_output.drafts.get(request_id, ())
        stay.request.num_computed_tokens -= rows.num_drafts - num_accepted
        stay.num_unjudged -= rows.num_drafts
        stay.num_drawing -= 1
        if self.speculation is not None:
            num_verified = runner_output.verified.get(request_id, 0)
            self.speculation.judged(stay.drafts, rows, num_verified, num_accepted, next_drafts)
        if stay.drafts:
            stay.earlier_drafts = stay.drafts
        stay.drafts = next_drafts

    def _finish(
        self, request: Request, reason: FinishReason, *, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        if request.status is RequestStatus.RUNNING:
            del self._running[request.request_id]
            self._cache.free(request.request_id)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        request.finish(reason, stop_reason=stop_reason, error=error)


def _assignment(stay: _Stay) -> SlotAssignment:
    request = stay.request
    return SlotAssignment(
        request_id=request.request_id,
        state_slot=stay.state_slot,
        token_ids=tuple(request.token_ids()),
        params=request.params,
        seed=request.seed,
        wants_prompt_logits=request.wants_prompt_logits,
        constraint=request.constraint,
    )
