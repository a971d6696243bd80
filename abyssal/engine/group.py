"""SampleGroup: the sequences that are drawn for one prompt, and the one output that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.outputs import RequestMetrics, RequestOutput
from ..core.sampling_params import SamplingParams
from .tracker import RequestTracker


class SampleGroup:
    """Trackers of the sequences of one request, in the order of their outputs.

    Attributes:
        request_id: of the request; the first sequence has the same, the others one of their own.
        trackers: grows while the request is added.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.trackers: list[RequestTracker] = []

    def sequence_id(self, index: int) -> str:
        """Id of one sequence."""
        return self.request_id if index == 0 else f"{self.request_id}/{index}"

    @property
    def is_finished(self) -> bool:
        """Whether no sequence will draw any more."""
        return all(tracker.request.is_finished for tracker in self.trackers)

    def output(self) -> RequestOutput:
        """The request as it stands: what all sequences have drawn, finished when all of them are."""
        parts = [tracker.output() for tracker in self.trackers]
        for index, part in enumerate(parts):
            part.outputs[0].index = index
        if len(parts) == 1:
            return parts[0]
        return replace(
            parts[0],
            outputs=[part.outputs[0] for part in parts],
            finished=all(part.finished for part in parts),
            error=next((part.error for part in parts if part.error is not None), None),
            metrics=_merged([tracker.metrics for tracker in self.trackers]),
        )


def params_of(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of one of a request's sequences: what concerns the prompt is left to the first."""
    return params if index == 0 else replace(params, prompt_logprobs=None)


def _merged(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    def of(name: str) -> list[float]:
        return [value for one in metrics if (value := getattr(one, name)) is not None]

    ends = of("finished_time")
    return RequestMetrics(
        arrival_time=metrics[0].arrival_time,
        first_scheduled_time=min(of("first_scheduled_time"), default=None),
        first_token_time=min(of("first_token_time"), default=None),
        finished_time=max(ends) if len(ends) == len(metrics) else None,
        num_preemptions=sum(one.num_preemptions for one in metrics),
    )
