"""`abyssal batch`: answer a file of OpenAI batch requests, resumable after any interruption."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..config.engine import EngineConfig
from . import arguments

if TYPE_CHECKING:
    from ..batch import BatchJob, BatchProgress

DESCRIPTION = """\
Answer a file of OpenAI batch requests (/v1/chat/completions and /v1/completions), one JSON object a line.

Answers are written as they finish, each as one line with the custom_id of its request; a line that cannot be served gets an
error for an answer. The same command goes on after any interruption: lines that have an answer are left alone. Ctrl-C
finishes what is running; a second one stops at once.

Exit status: 0 every line is answered; 1 every line is answered, some by an error; 2 nothing was done, the message says why;
130 interrupted, to be gone on with."""

LOG_SECONDS = 30.0
"""Between two lines of progress where there is no terminal."""

SPEED_SECONDS = 10.0
"""What speeds are averaged over."""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "batch",
        allow_abbrev=False,
        help="answer a file of OpenAI batch requests",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", metavar="IN.jsonl", help="requests, one a line; read in bounded memory")
    parser.add_argument("output", metavar="OUT.jsonl", help="answers; beside it, OUT.jsonl.journal says what they belong to")
    parser.add_argument("--ordered", action="store_true", help="write answers in the order of the input, not as they finish")
    parser.add_argument("--error-file", metavar="FILE", help="where answers that are errors go [OUT.jsonl]")
    parser.add_argument("--restart", action="store_true", help="begin anew, deleting what the output files hold")
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        help="refuse lines whose body names another model; the first one stands in the answers. May be given several "
        "times. [any name is taken, the model's own is in the answers]",
    )
    arguments.add_model(parser)
    arguments.add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer what is left."""
    model = arguments.require_model(args)
    settings = arguments.given(args, EngineConfig)
    with _open_job(args, model, EngineConfig(**settings)) as job:
        if job.is_complete:
            _say(f"nothing to do: all {job.num_answered} lines of {args.input} have their answer in {args.output}")
            return 1 if job.num_failed else 0
        if job.num_answered:
            _say(f"going on: {job.num_answered} of {job.scan.num_requests} lines are answered")
        from ..llm import LLM

        llm = LLM(model, revision=args.revision, assume_yes=args.yes, **settings)
        with _interrupts() as interrupts, Reporter() as reporter:
            names = args.served_model_name or ()
            progress = job.run(llm, served_names=names, stop=interrupts.seen, on_progress=reporter)
        # Not closed after an interrupt, which may have caught it in the middle of a step; the process ends anyway.
        llm.close()
    _say(_summary(progress))
    if not progress.is_complete:
        return 130
    return 1 if progress.failed else 0


def _open_job(args: argparse.Namespace, model: str, config: EngineConfig) -> BatchJob:
    from ..batch.identity import folder_facts, settings_facts
    from ..batch.job import BatchJob

    folder = Path(model).expanduser()
    names = args.served_model_name or [folder.resolve().name if folder.is_dir() else model]
    return BatchJob(
        args.input,
        args.output,
        model_name=names[0],
        error_path=args.error_file,
        ordered=args.ordered,
        restart=args.restart,
        facts={**settings_facts(config), **(folder_facts(folder) if folder.is_dir() else {})},
    )


class Interrupts:
    """Counts Ctrl-C: the first asks for an end, the second is an end."""

    def __init__(self) -> None:
        self._count = 0

    def seen(self) -> bool:
        """Whether there was one."""
        return self._count > 0

    def take(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler. What comes after the second does nothing, while files are closed."""
        self._count += 1
        if self._count == 2:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _interrupts() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.take)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


class Reporter:
    """Shows progress on stderr: a bar on a terminal, otherwise a line now and then."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._has_bar = self._bar.console.is_terminal
        self._task = self._bar.add_task("", total=None, figures="")
        self._samples: deque[BatchProgress] = deque()
        self._next_line = LOG_SECONDS
        self._said_stop = False

    def __enter__(self) -> Reporter:
        if self._has_bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, progress: BatchProgress) -> None:
        """Take the newest figures."""
        self._samples.append(progress)
        while progress.elapsed - self._samples[0].elapsed > SPEED_SECONDS:
            self._samples.popleft()
        if self._has_bar:
            figures = figures_of(self._samples[0], progress)
            self._bar.update(self._task, total=progress.total, completed=progress.done, figures=figures)
        elif progress.elapsed >= self._next_line or progress.is_stopping > self._said_stop:
            self._next_line = progress.elapsed + LOG_SECONDS
            self._said_stop = progress.is_stopping
            _say(f"{progress.done}/{progress.total} {figures_of(self._samples[0], progress)}")


def figures_of(before: BatchProgress, now: BatchProgress) -> str:
    """Speeds between two snapshots, and how things stand at the second."""
    if now.is_stopping:
        return f"finishing the {now.running + now.waiting} that run; Ctrl-C again stops at once"
    seconds = now.elapsed - before.elapsed
    into = (now.tokens_in - before.tokens_in) / seconds if seconds > 0 else 0.0
    out = (now.tokens_out - before.tokens_out) / seconds if seconds > 0 else 0.0
    parts = [f"in {into:,.0f} out {out:,.0f} tok/s", f"running {now.running}", f"waiting {now.waiting}"]
    if now.hit_rate is not None:
        parts.append(f"hits {now.hit_rate:.0%}")
    if now.failed:
        parts.append(f"failed {now.failed}")
    parts.append(f"ETA {_clock(now.eta)}")
    return "  ".join(parts)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _summary(progress: BatchProgress) -> str:
    fresh = progress.done - progress.resumed
    state = "done" if progress.is_complete else "interrupted; the same command goes on"
    failed = f", {progress.failed} of them by an error" if progress.failed else ""
    speed = progress.tokens_out / progress.elapsed if progress.elapsed > 0 else 0.0
    return (
        f"{state}: {progress.done} of {progress.total} lines are answered{failed}; {fresh} in this run, "
        f"{progress.tokens_in:,} tokens in, {progress.tokens_out:,} out, {_clock(progress.elapsed)}, out {speed:,.1f} tok/s"
    )


def _say(text: str) -> None:
    print(f"abyssal batch: {text}", file=sys.stderr)
