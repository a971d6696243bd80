"""StepPipeline: computes steps in order, beside the thread that schedules them if it is told to.

    host    schedule N+1 | wait for N ... | results of N, schedule N+2 | wait for N+1 ...
    runner  step N ................ | step N+1 ................... | step N+2 ...

The runner's thread is its device stream: what is put in runs in order, and each step finds the tokens, caches and block
tables that those before it have left.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from ..core.batch import RunnerOutput, SchedulerOutput


class Runner(Protocol):
    """What computes steps."""

    def run(self, step: SchedulerOutput) -> RunnerOutput: ...


class StepPipeline:
    """Steps that are out.

    Attributes:
        overlap: compute on a thread of its own; else before `launch` returns. May be changed while no step is out.
        idle_seconds: for which the runner had nothing to compute between one step and the next.
    """

    def __init__(self, runner: Runner, *, overlap: bool) -> None:
        self.overlap = overlap
        self.idle_seconds = 0.0
        self._runner = runner
        self._idle_since: float | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._out: deque[tuple[SchedulerOutput, Future[RunnerOutput]]] = deque()

    @property
    def num_out(self) -> int:
        """Steps launched whose results were not taken."""
        return len(self._out)

    @property
    def is_full(self) -> bool:
        """Whether results should be taken before another step is scheduled."""
        return len(self._out) > (1 if self.overlap else 0)

    def launch(self, step: SchedulerOutput) -> None:
        """Compute a step after those that were launched before."""
        if self.overlap:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="abyssal-runner")
            self._out.append((step, self._thread.submit(self._run, step)))
            return
        result: Future[RunnerOutput] = Future()
        self._out.append((step, result))
        try:
            result.set_result(self._run(step))
        except Exception as error:
            result.set_exception(error)

    def take(self) -> tuple[SchedulerOutput, RunnerOutput]:
        """The oldest step that is out, and its results; waits for them. Raises what computing it raised."""
        step, result = self._out.popleft()
        return step, result.result()

    def rest(self) -> None:
        """No step will come for a while: the time until then is not counted as idle."""
        self._idle_since = None

    def close(self) -> None:
        """Wait for all steps, drop their results, end the thread."""
        self._out.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _run(self, step: SchedulerOutput) -> RunnerOutput:
        if self._idle_since is not None:
            self.idle_seconds += time.perf_counter() - self._idle_since
        try:
            return self._runner.run(step)
        finally:
            self._idle_since = time.perf_counter()
