"""Exact rows of a step that was scheduled before its tokens were known.

A row for a token that was drawn, or will have been by now, lies where the runner's own tokens of the slot end; behind it
lie as many drafts as the slot really holds. If more are at hand than the step has rows for, the most promising get them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..core.batch import ScheduledRows, SchedulerOutput
from .input_batch import InputBatch

DraftSplit = Callable[[int, Sequence[tuple[float, ...]]], list[int]]
"""Gives a number of rows to drafts, by the logits of their confidences: how many of each request are verified."""


def resolve(
    step: SchedulerOutput, inputs: InputBatch, confidences: Mapping[int, tuple[float, ...]], split: DraftSplit | None
) -> SchedulerOutput:
    """The step as it is computed.

    Rows for which a slot has no room are left out: the request has ended at its limit, and nobody takes their results.

    Args:
        confidences: by slot, the logits of the drafts that it holds.
        split: asked if not all drafts can be verified.
    """
    rows = [_placed(r, inputs, len(confidences.get(r.state_slot, ()))) for r in step.rows]
    rows = [r for r in rows if r.start < inputs.num_reserved_tokens(r)]
    most = [r.num_drafts for r in rows]
    total = sum(most) if step.draft_rows is None else min(step.draft_rows, sum(most))
    if total == sum(most):
        lengths = most
    elif total == 0:
        lengths = [0] * len(rows)
    else:
        assert split is not None, "some drafts are to be left out, but nothing says which"
        lengths = split(total, [confidences.get(r.state_slot, ())[: r.num_drafts] for r in rows])
    return SchedulerOutput(step.assignments, tuple(map(_with_drafts, rows, lengths)), sum(lengths), observes=step.observes)


def _placed(rows: ScheduledRows, inputs: InputBatch, num_at_hand: int) -> ScheduledRows:
    if not rows.samples or rows.num_rows - rows.num_drafts != 1:
        return rows
    start = inputs.num_tokens(rows.state_slot) - 1
    num_drafts = max(0, min(rows.num_drafts, num_at_hand, inputs.num_reserved_tokens(rows) - 1 - start))
    return rows._replace(start=start, num_rows=1 + num_drafts, num_drafts=num_drafts)


def _with_drafts(rows: ScheduledRows, num_drafts: int) -> ScheduledRows:
    if num_drafts == rows.num_drafts:
        return rows
    return rows._replace(num_rows=rows.num_rows - rows.num_drafts + num_drafts, num_drafts=num_drafts)
