"""The loop of a job: lines in, requests through the engine, answers out.

fill: LineSource.next -> RequestReader.read -> Engine.add
step: Engine.step -> ResponseWriter -> AnswerSink
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.errors import AbyssalError
from ..core.outputs import RequestOutput
from .lines import BatchLine, LineRefused, LineSource
from .progress import BatchProgress
from .request import LineRequest, RequestReader
from .response import ResponseWriter
from .sink import AnswerSink

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.stats import EngineStats

PROGRESS_SECONDS = 0.1
ORDERED_WINDOW = 16
"""In order, lines read ahead of the first that is not written, as a multiple of the engine's sequences."""

log = logging.getLogger(__name__)


@dataclass
class _OpenLine:
    """A line that is being computed: its outputs by part, and which of its requests are in the engine."""

    request: LineRequest
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.request.line.number


class BatchLoop:
    """Drives one engine through one job."""

    def __init__(
        self,
        engine: Engine,
        source: LineSource,
        reader: RequestReader,
        writer: ResponseWriter,
        sink: AnswerSink,
        *,
        total: int,
        stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[BatchProgress], None] = lambda progress: None,
    ) -> None:
        """Prepare.

        Args:
            total: lines of the input that get an answer.
            stop: asked between steps; once it is true, nothing new is begun and the loop ends with what runs.
            on_progress: called ten times a second at most, and at the end.
        """
        self._engine, self._source, self._reader, self._writer, self._sink = engine, source, reader, writer, sink
        self._total, self._stop, self._on_progress = total, stop, on_progress
        # As many requests wait as run, so that a step that ends several finds others at once.
        self._room = 2 * engine.config.max_num_seqs
        self._window = ORDERED_WINDOW * engine.config.max_num_seqs
        self._open: dict[int, _OpenLine] = {}
        self._owners: dict[str, int] = {}
        self._begun: set[str] = set()
        self._unsubmitted: deque[tuple[_OpenLine, int]] = deque()
        self._reads = True
        self._is_stopping = False
        self._resumed = len(sink.answered)
        self._started = time.monotonic()
        self._next_progress = 0.0
        self._stats_before = engine.stats

    def run(self) -> BatchProgress:
        """Answer every line, or those that had begun when `stop` came."""
        try:
            while self._fill():
                for output in self._engine.step():
                    self._receive(output)
                self._sink.sync_if_due()
                self._tell()
        except BaseException:
            # An interrupt may have caught the engine in the middle of a step; what matters is the first reason.
            with contextlib.suppress(Exception):
                for request_id in self._owners:
                    self._engine.abort(request_id)
            raise
        progress = self._progress()
        self._on_progress(progress)
        return progress

    def _fill(self) -> bool:
        """Give the engine work while it has room; False once there is nothing left to wait for."""
        while len(self._owners) < self._room and self._sink.num_open < self._window:
            if not self._is_stopping and self._stop():
                self._begin_stop()
            if self._unsubmitted:
                self._submit(*self._unsubmitted.popleft())
            elif not self._reads or not self._read_line():
                break
            self._tell()
        if not self._is_stopping and self._stop():
            self._begin_stop()
        return bool(self._owners or self._unsubmitted or self._reads)

    def _read_line(self) -> bool:
        """Take the next line; False at the end of the input."""
        numbered = self._source.next()
        if numbered is None:
            self._reads = False
            return False
        number, line = numbered
        if line is None:
            return True
        self._sink.begin(number)
        if isinstance(line, LineRefused):
            self._fail(number, None, line)
        else:
            self._open_line(line)
        return True

    def _open_line(self, line: BatchLine) -> None:
        try:
            request = self._reader.read(line)
        except AbyssalError as error:
            self._fail(line.number, line.custom_id, error)
            return
        except Exception as error:  # one line must not end a job of a million, now or whenever it is resumed
            log.exception("line %d could not be read", line.number)
            self._fail(line.number, line.custom_id, error)
            return
        opened = _OpenLine(request)
        self._open[line.number] = opened
        self._unsubmitted.extend((opened, index) for index in range(len(request.parts)))

    def _submit(self, opened: _OpenLine, index: int) -> None:
        if opened.number not in self._open:
            return
        request_id = f"batch-{opened.number}-{index}"
        part = opened.request.parts[index]
        try:
            self._engine.add(
                part.prompt_token_ids, part.params, request_id=request_id, sink=part.parser, structured=part.structured
            )
        except AbyssalError as error:
            self._close_failed(opened, error)
            return
        opened.running[request_id] = index
        self._owners[request_id] = opened.number

    def _receive(self, output: RequestOutput) -> None:
        request_id = output.request_id
        number = self._owners.get(request_id)
        if number is None:
            return
        if not output.finished:
            self._begun.add(request_id)
            return
        opened = self._open[number]
        opened.outputs[opened.running[request_id]] = output
        self._forget(opened, request_id)
        if output.error is not None:
            self._close_failed(opened, LineRefused("server_error", output.error, status=500))
        elif any(completion.finish_reason == "abort" for completion in output.outputs):
            raise RuntimeError(f"the engine gave up line {number}; run the job again to go on with it")
        elif len(opened.outputs) == len(opened.request.parts):
            self._close_done(opened)

    def _close_done(self, opened: _OpenLine) -> None:
        outputs = [opened.outputs[index] for index in range(len(opened.request.parts))]
        del self._open[opened.number]
        try:
            line = self._writer.success(opened.request, outputs)
        except Exception as error:  # as in _open_line
            log.exception("the answer of line %d could not be written", opened.number)
            self._fail(opened.number, opened.request.line.custom_id, error)
            return
        self._sink.put(opened.number, line, failed=False)

    def _close_failed(self, opened: _OpenLine, error: Exception) -> None:
        self._drop(opened)
        self._fail(opened.number, opened.request.line.custom_id, error)

    def _fail(self, number: int, custom_id: str | None, error: Exception) -> None:
        self._sink.put(number, self._writer.failure(number, custom_id, error), failed=True)

    def _drop(self, opened: _OpenLine) -> None:
        """Give up a line's requests, those of them that are not in the engine yet included."""
        del self._open[opened.number]
        for request_id in list(opened.running):
            self._forget(opened, request_id)
            self._engine.abort(request_id)

    def _forget(self, opened: _OpenLine, request_id: str) -> None:
        del opened.running[request_id]
        del self._owners[request_id]
        self._begun.discard(request_id)

    def _begin_stop(self) -> None:
        """Begin nothing new: lines of which nothing runs are left for the next time."""
        self._is_stopping, self._reads = True, False
        num_waiting = self._engine.stats.num_requests_waiting
        for opened in self._newest_first():
            waiting = len(opened.running)
            if waiting <= num_waiting and self._begun.isdisjoint(opened.running) and not opened.outputs:
                num_waiting -= waiting
                self._drop(opened)
        self._on_progress(self._progress())

    def _newest_first(self) -> Iterator[_OpenLine]:
        # Requests begin in the order in which they came, so that those which wait are the newest.
        return iter([self._open[number] for number in sorted(self._open, reverse=True)])

    def _tell(self) -> None:
        now = time.monotonic()
        if now >= self._next_progress:
            self._next_progress = now + PROGRESS_SECONDS
            self._on_progress(self._progress())

    def _progress(self) -> BatchProgress:
        before, now = self._stats_before, self._engine.stats
        return BatchProgress(
            total=self._total,
            done=len(self._sink.answered),
            resumed=self._resumed,
            failed=self._sink.num_failed,
            tokens_in=now.num_prompt_tokens - before.num_prompt_tokens,
            tokens_out=now.num_generation_tokens - before.num_generation_tokens,
            running=now.num_requests_running,
            waiting=now.num_requests_waiting,
            hit_rate=_hit_rate(before, now),
            elapsed=time.monotonic() - self._started,
            is_stopping=self._is_stopping,
        )


def _hit_rate(before: EngineStats, now: EngineStats) -> float | None:
    """Share of the tokens looked up in the prefix cache that were there, if the engine counts them."""

    def count(stats: EngineStats, name: str) -> int:
        value: int = getattr(stats, name, 0)
        return value

    queries = count(now, "prefix_cache_queries") - count(before, "prefix_cache_queries")
    hits = count(now, "prefix_cache_hits") - count(before, "prefix_cache_hits")
    return hits / queries if queries else None
