"""BatchJob: one input, its output files and their journal; opened before a model is loaded, so that a job that cannot go on
is refused at once."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..core.errors import ConfigError
from .answers import RESTART, AnswerFile, sync_folder
from .identity import engine_facts, model_name_of
from .journal import Facts, Journal, journal_path, read_journal, write_journal
from .lines import InputScan, LineSource
from .loop import BatchLoop
from .progress import BatchProgress
from .request import RequestReader
from .response import ResponseWriter
from .sink import AnswerSink

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..llm import LLM

NO_FACTS: Facts = {}


def run_batch(
    llm: LLM | Engine,
    input_path: str | Path,
    output_path: str | Path,
    *,
    error_path: str | Path | None = None,
    ordered: bool = False,
    restart: bool = False,
    model_name: str | None = None,
    served_names: Sequence[str] = (),
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[BatchProgress], None] = lambda progress: None,
) -> BatchProgress:
    """Answer every line of a file of OpenAI batch requests, or go on with that.

    Lines that `output_path` (or `error_path`) answers already are left alone. The input and the answers never lie in memory
    as a whole.

    Args:
        llm: an LLM, or an Engine, without requests.
        error_path: where answers that are errors go; None for `output_path`.
        ordered: write answers in the order of the input rather than as they finish.
        restart: begin anew, deleting what the output files hold.
        model_name: the name in the answers; None for that of the model's folder.
        served_names: names that a line's `model` may have, the first one standing in answers for a line without; none to
            take any.
        stop: asked between steps; once it is true, what runs is finished and nothing begun.
        on_progress: called ten times a second at most, and at the end.

    Raises:
        ConfigError: if the output belongs to another job, or a file cannot be used.
        OSError: if a file cannot be read or written; what was answered stays.
    """
    engine = _engine_of(llm)
    name = served_names[0] if served_names else model_name or model_name_of(engine)
    with BatchJob(input_path, output_path, model_name=name, error_path=error_path, ordered=ordered, restart=restart) as job:
        return job.run(engine, served_names=served_names, stop=stop, on_progress=on_progress)


class BatchJob:
    """A job on disk, held against other processes until it is closed.

    Attributes:
        scan: of the input.
    """

    def __init__(
        self,
        input_path: str | Path,
        output_path: str | Path,
        *,
        model_name: str,
        error_path: str | Path | None = None,
        ordered: bool = False,
        restart: bool = False,
        facts: Facts = NO_FACTS,
    ) -> None:
        """Open or create; the arguments as in `run_batch`.

        Args:
            facts: what is known of model and settings before the model is loaded.

        Raises:
            ConfigError, OSError: as `run_batch`.
        """
        self._input, output = Path(input_path), Path(output_path)
        errors = None if error_path is None else Path(error_path)
        self._journal_path = journal_path(output)
        _refuse_same([self._input, output, self._journal_path, *([] if errors is None else [errors])])
        self.scan = InputScan.of(self._input)
        self._model_name, self._restart = model_name, restart
        self._facts: Facts = {
            "input_sha256": self.scan.sha256,
            "input_bytes": self.scan.num_bytes,
            "model": model_name,
            "ordered": ordered,
            "error_file": None if errors is None else os.path.relpath(errors.resolve(), output.resolve().parent),
        }
        with contextlib.ExitStack() as files:
            self._output = files.enter_context(AnswerFile(output))
            self._errors = None if errors is None else files.enter_context(AnswerFile(errors))
            self._sink = AnswerSink(self._output, self._errors, ordered=ordered)
            files.callback(self._sink.close)
            self._journal = None if restart else self._recover({**self._facts, **facts})
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def num_answered(self) -> int:
        """Lines that have their answer."""
        return len(self._sink.answered)

    @property
    def num_failed(self) -> int:
        """Of these, errors."""
        return self._sink.num_failed

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return not self._restart and self.num_answered == self.scan.num_requests

    def run(
        self,
        llm: LLM | Engine,
        *,
        served_names: Sequence[str] = (),
        stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[BatchProgress], None] = lambda progress: None,
    ) -> BatchProgress:
        """Answer what is left. To be called once; arguments, result and errors as of `run_batch`."""
        engine = _engine_of(llm)
        if engine.has_unfinished:
            raise ConfigError("the engine has requests of others; a batch needs one of its own, or an idle one")
        journal = self._begin({**self._facts, **engine_facts(engine)})
        writer = ResponseWriter(created=journal.created, tag=journal.tag, model=self._model_name, tokenizer=engine.tokenizer)
        with self._input.open("rb", buffering=2**20) as file:
            loop = BatchLoop(
                engine,
                LineSource(file, self.scan.num_bytes, self._sink.answered),
                RequestReader(engine, served_names),
                writer,
                self._sink,
                total=self.scan.num_requests,
                stop=stop,
                on_progress=on_progress,
            )
            return loop.run()

    def close(self) -> None:
        """Sync the output files and let go of them. Harmless when repeated."""
        self._files.close()

    def _recover(self, facts: Facts) -> Journal | None:
        """Find out what is answered. None if nothing is, so that a new job may take the place of an old one."""
        files = [file for file in (self._output, self._errors) if file is not None]
        if all(file.is_empty for file in files):
            return None
        journal = read_journal(self._journal_path)
        if journal is None:
            held = next(file.path for file in files if not file.is_empty)
            raise ConfigError(f"{held} is not empty, and no journal {self._journal_path} says what it belongs to; {RESTART}")
        journal.require(self._output.path, facts)
        for file in files:
            for number, failed in file.recover(journal.tag):
                self._sink.note(number, failed=failed)
        return journal

    def _begin(self, facts: Facts) -> Journal:
        """The journal of this job, written before its first answer is."""
        if self._journal is not None and self.num_answered:
            self._journal.require(self._output.path, facts)
            return self._journal
        if self._restart:
            for file in (self._errors, self._output):
                if file is not None:
                    file.clear()
        journal = Journal(int(time.time()), facts)
        write_journal(self._journal_path, journal)
        sync_folder(self._output.path.absolute().parent)
        return journal


def _engine_of(llm: LLM | Engine) -> Engine:
    engine: Engine = getattr(llm, "engine", llm)  # type: ignore[arg-type]
    return engine


def _refuse_same(paths: Sequence[Path]) -> None:
    for index, path in enumerate(paths):
        for other in paths[:index]:
            is_same = path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))
            if is_same:
                raise ConfigError(
                    f"{path} cannot serve twice: input, output, error file and journal must be different files"
                )
