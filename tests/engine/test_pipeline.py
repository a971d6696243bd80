"""Steps on a thread of their own: in order, at most one ahead, errors where their results are taken."""

from __future__ import annotations

import threading

import pytest

from abyssal.core.batch import RunnerOutput, SchedulerOutput
from abyssal.engine.pipeline import StepPipeline


class Recorder:
    def __init__(self):
        self.seen, self.gate = [], threading.Event()

    def run(self, step):
        self.gate.wait(10)
        self.seen.append((step.draft_rows, threading.current_thread().name))
        if step.draft_rows == 2:
            raise ValueError("step 2")
        return RunnerOutput(errors={"step": str(step.draft_rows)})


def step_number(number):
    return SchedulerOutput((), (), draft_rows=number)


def test_steps_overlap_and_keep_their_order():
    runner = Recorder()
    pipeline = StepPipeline(runner, overlap=True)
    pipeline.launch(step_number(0))
    assert not pipeline.is_full  # another may be scheduled while this one is held up
    pipeline.launch(step_number(1))
    assert pipeline.is_full
    assert runner.seen == []
    runner.gate.set()
    results = [pipeline.take()[1].errors["step"] for _ in range(2)]
    assert results == ["0", "1"]
    assert [number for number, _ in runner.seen] == [0, 1]
    assert {name for _, name in runner.seen} != {threading.current_thread().name}
    pipeline.close()


def test_without_overlap_a_step_is_done_when_it_is_launched():
    runner = Recorder()
    runner.gate.set()
    pipeline = StepPipeline(runner, overlap=False)
    pipeline.launch(step_number(0))
    assert runner.seen == [(0, threading.current_thread().name)]
    assert pipeline.is_full
    assert pipeline.take()[1].errors == {"step": "0"}


@pytest.mark.parametrize("overlap", [True, False])
def test_an_error_is_raised_once(overlap):
    runner = Recorder()
    runner.gate.set()
    pipeline = StepPipeline(runner, overlap=overlap)
    pipeline.launch(step_number(2))
    with pytest.raises(ValueError, match="step 2"):
        pipeline.take()
    pipeline.launch(step_number(3))
    assert pipeline.take()[1].errors == {"step": "3"}
    pipeline.close()
