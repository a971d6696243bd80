"""RequestRegistry: the engine's unfinished requests, and how results of a step reach them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..core.batch import RunnerOutput, SampledToken, SchedulerOutput
from ..core.outputs import RequestOutput
from ..core.request import Request
from ..scheduler.scheduler import Scheduler
from .group import SampleGroup
from .stats import EngineCounters
from .tracker import RequestTracker


class RequestRegistry:
    """Groups by the ids of their sequences, and trackers of the sequences that still draw.

    Args:
        scheduler: told of sequences that their text ends.
        counters: where tokens are counted.
    """

    def __init__(self, scheduler: Scheduler, counters: EngineCounters) -> None:
        self._scheduler, self._counters = scheduler, counters
        self._trackers: dict[str, RequestTracker] = {}
        self._groups: dict[str, SampleGroup] = {}

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._groups

    @property
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(dict.fromkeys(group.request_id for group in self._groups.values()))

    def add(self, group: SampleGroup) -> None:
        """A request whose sequences all draw."""
        self._trackers |= {tracker.request.request_id: tracker for tracker in group.trackers}
        self._groups |= {tracker.request.request_id: group for tracker in group.trackers}

    def group(self, request_id: str) -> SampleGroup | None:
        """An unfinished request, not one of its further sequences."""
        group = self._groups.get(request_id)
        return group if group is not None and group.request_id == request_id else None

    def sequence(self, sequence_id: str) -> Request | None:
        """A sequence that still draws."""
        tracker = self._trackers.get(sequence_id)
        return None if tracker is None else tracker.request

    def end(self, sequence_id: str) -> None:
        """A sequence draws no more."""
        self._trackers.pop(sequence_id, None)

    def output(self, group: SampleGroup) -> RequestOutput:
        """What a request has come to; it is forgotten once it is finished."""
        if group.is_finished:
            for tracker in group.trackers:
                del self._groups[tracker.request.request_id]
        return group.output()

    def begin(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Note who starts in a step, and tell the runner where their prompts end."""
        now = time.monotonic()
        assignments = []
        for assignment in scheduled.assignments:
            tracker = self._trackers[assignment.request_id]
            tracker.metrics.first_scheduled_time = tracker.metrics.first_scheduled_time or now
            assignments.append(replace(assignment, num_prompt_tokens=tracker.request.num_prompt_tokens))
        return replace(scheduled, assignments=tuple(assignments))

    def take(self, requests: Iterable[Request], scheduled: SchedulerOutput, result: RunnerOutput) -> list[RequestOutput]:
        """Hand a step's results to those requests of it for which they count; what has become of those with news."""
        rows_of = {rows.request_id: rows for rows in scheduled.rows}
        changed: dict[str, SampleGroup] = {}
        for request in requests:
            request_id = request.request_id
            rows, tracker = rows_of[request_id], self._trackers[request_id]
            num_known = rows.num_rows - rows.num_drafts
            self._counters.num_prompt_tokens += num_known - int(rows.samples and num_known == 1)
            tracker.take_prompt_rows(
                rows.start, result.prompt_logprobs.get(request_id, ()), result.prompt_logits.get(request_id)
            )
            sampled = result.sampled.get(request_id, [])
            self._take_tokens(tracker, sampled)
            if request.is_finished:
                del self._trackers[request_id]
            if sampled or request.is_finished:
                group = self._groups[request_id]
                changed[group.request_id] = group
        return [self.output(group) for group in changed.values()]

    def _take_tokens(self, tracker: RequestTracker, sampled: Sequence[SampledToken]) -> None:
        """Hand a request's new tokens on one by one; a stop string drops those behind it."""
        request = tracker.request
        num_new = len(request.output_token_ids) - tracker.num_tokens
        for token in sampled[:num_new]:
            self._counters.num_generation_tokens += 1
            tracker.take_token(token)
            if tracker.stop_string is not None:
                break
        if tracker.stop_string is None:
            return
        if not request.is_finished:
            self._scheduler.stop(request.request_id, tracker.stop_string, num_output_tokens=tracker.num_tokens)
        elif tracker.num_tokens < len(request.output_token_ids):
            request.end_earlier(tracker.num_tokens, tracker.stop_string)
