"""Threads that compile, each job with its own time limit.

A thread cannot be stopped. When a job runs too long its future fails, its thread is given up (and ends by itself when the
job returns), and another one takes its place. Too many given up at once means that no more jobs are taken.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import AbyssalError

MAX_GIVEN_UP = 8


class CompilerBusy(AbyssalError):
    """Too many grammars that took too long are still being compiled; try again later."""


@dataclass(eq=False)
class _Job:
    call: Callable[[], Any]
    future: Future[Any]
    limit_s: float
    late: Exception
    deadline: float | None = None
    given_up: bool = field(default=False)


class CompilePool:
    """A few daemon threads and one that watches the time."""

    def __init__(self, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._active: set[_Job] = set()
        self._wake = threading.Condition()
        self._closed = False
        self._num_given_up = 0
        self._num_threads = num_threads
        self._started = False

    def submit(self, call: Callable[[], Any], limit_s: float, late: Exception) -> Future[Any]:
        """Run `call` soon. The future fails with `late` when it has run for `limit_s` seconds.

        Raises:
            CompilerBusy: if too many threads are stuck.
        """
        with self._wake:
            assert not self._closed, "the pool is closed"
            if self._num_given_up >= MAX_GIVEN_UP:
                raise CompilerBusy(
                    f"{self._num_given_up} grammars over their time limit are still being compiled; try again later"
                )
            if not self._started:
                self._started = True
                for _ in range(self._num_threads):
                    self._start(self._work)
                self._start(self._watch)
        job = _Job(call, Future(), limit_s, late)
        self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """End the threads that are idle; the others end with their job."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _start(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name="abyssal-grammar", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._wake:
                job.deadline = time.monotonic() + job.limit_s
                self._active.add(job)
                self._wake.notify_all()
            try:
                result, error = job.call(), None
            except Exception as failure:
                result, error = None, failure
            with self._wake:
                self._active.discard(job)
                if job.given_up:
                    self._num_given_up -= 1
                    return
            _settle(job.future, result, error)

    def _watch(self) -> None:
        while True:
            with self._wake:
                if self._closed:
                    return
                now = time.monotonic()
                late = [job for job in self._active if job.deadline is not None and job.deadline <= now]
                for job in late:
                    job.given_up = True
                    self._active.discard(job)
                    self._num_given_up += 1
                    self._start(self._work)
                if not late:
                    waits = [job.deadline - now for job in self._active if job.deadline is not None]
                    self._wake.wait(min(waits) if waits else None)
            for job in late:
                _settle(job.future, None, job.late)


def _settle(future: Future[Any], result: Any, error: Exception | None) -> None:
    """Finish a future unless somebody has cancelled it."""
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:
        pass
