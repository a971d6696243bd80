"""Grammars compiled off the loop: a small pool with a time limit for each, and a cache by content with a limit in bytes."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..core.errors import InvalidRequest
from .grammar import Backend, EngineMatcher
from .markup import SpelledMarker
from .matcher import Matcher
from .pool import CompilePool
from .rules import Phase, Rules
from .spec import StructuredOutput
from .vocabulary import Vocabulary

MAX_STOP_SETS = 64
SLOW_SECONDS = 0.2
"""A grammar that takes longer is compiled once only, whatever the backend asks for."""


class CompiledGrammar:
    """A specification made ready for one vocabulary; shared by all requests that ask for the same.

    Attributes:
        spec: what it enforces.
        size_bytes: what it takes, roughly.
    """

    def __init__(
        self,
        spec: StructuredOutput,
        backend: Backend,
        engines: Sequence[EngineMatcher],
        size_bytes: int,
        marker: SpelledMarker | None,
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.size_bytes = size_bytes
        self._engines = engines
        self._num_matchers = 0
        self._marker = marker
        self._rules: dict[frozenset[int], Rules] = {}
        self._lock = threading.Lock()

    def matcher(self, stop_ids: Iterable[int] = ()) -> Matcher:
        """A matcher at the start of an answer. `stop_ids` end the request besides the EOS ids."""
        stops = frozenset(stop_ids)
        with self._lock:
            rules = self._rules.get(stops)
            if rules is None:
                rules = Rules.of(self.spec, self.backend, stops, self._marker)
                if len(self._rules) < MAX_STOP_SETS:
                    self._rules[stops] = rules
            engine = self._engines[self._num_matchers % len(self._engines)].fork() if self._engines else None
            self._num_matchers += 1
        return Matcher(rules, engine, Phase.REASONING if self.spec.thinking else rules.after_reasoning)


@dataclass
class CompilerStats:
    """Counts since the start."""

    num_compiled: int = 0
    num_cached: int = 0
    num_failed: int = 0
    compile_seconds: float = 0.0


class GrammarCompiler:
    """Compiles specifications for one vocabulary. May be used from several threads.

    Args:
        vocabulary: of the model.
        num_threads: threads that compile.
        mask_threads: threads that fill masks.
        time_limit_s: longest time for one grammar, waiting not included.
        cache_bytes: what all compiled grammars kept may take, roughly.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        num_threads: int = 2,
        mask_threads: int = 2,
        time_limit_s: float = 10.0,
        cache_bytes: int = 256 << 20,
    ) -> None:
        self._vocabulary = vocabulary
        self._mask_threads = mask_threads
        self._time_limit_s = time_limit_s
        self._cache_bytes = cache_bytes
        self._pool = CompilePool(num_threads)
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._cached_bytes = 0
        self._running: dict[str, Future[CompiledGrammar]] = {}
        self._num_waiting: dict[str, int] = {}  # who asked for what is being compiled
        self._backends: dict[str, Backend] = {}
        self._backend_lock = threading.Lock()
        self._marker: SpelledMarker | None = None
        self.stats = CompilerStats()

    def check(self, spec: StructuredOutput) -> None:
        """Refuse what is known not to be enforced, in the calling thread and within milliseconds for schemas of usual size.

        Raises:
            InvalidRequest: naming the parameter and, for a schema, keyword and path.
        """
        with self._lock:
            if spec.key in self._cache or spec.key in self._running:
                return
        if spec.thinking and self._vocabulary.think_end_id is None:
            raise InvalidRequest("thinking", True, "the tokenizer has no </think>")
        if spec.kind != "tools" or spec.tool_choice != "none":
            _backend_class(_library(spec)).check(spec, self._vocabulary.dsml_id)

    def submit(self, spec: StructuredOutput) -> Future[CompiledGrammar]:
        """Start compiling, or find it compiled. The future fails with `InvalidRequest`, after the time limit too."""
        with self._lock:
            cached = self._cache.get(spec.key)
            if cached is not None:
                self._cache.move_to_end(spec.key)
                self.stats.num_cached += 1
                done: Future[CompiledGrammar] = Future()
                done.set_result(cached)
                return done
            running = self._running.get(spec.key)
            if running is not None and not running.done():
                self._num_waiting[spec.key] += 1
                return running
            late = InvalidRequest(
                spec.kind, getattr(spec, spec.kind), f"takes more than {self._time_limit_s:g} s to compile; make it simpler"
            )
            future = self._pool.submit(lambda: self._compile(spec), self._time_limit_s, late)
            self._running[spec.key], self._num_waiting[spec.key] = future, 1
        future.add_done_callback(lambda done: self._keep(spec.key, done))
        return future

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        """Compile and wait.

        Raises:
            InvalidRequest: if it cannot be enforced or takes too long.
        """
        return self.submit(spec).result()

    @property
    def cached_bytes(self) -> int:
        """What the kept grammars take, roughly."""
        return self._cached_bytes

    def close(self) -> None:
        """Let the threads end. What is running is abandoned."""
        self._pool.close()

    def _compile(self, spec: StructuredOutput) -> CompiledGrammar:
        started = time.perf_counter()
        if spec.thinking and self._vocabulary.think_end_id is None:
            raise InvalidRequest("thinking", True, "the tokenizer has no </think>")
        backend = self._backend(_library(spec))
        marker = None
        if spec.kind == "tools":
            with self._backend_lock:
                self._marker = self._marker or SpelledMarker(self._vocabulary)
                marker = self._marker
        engines: list[EngineMatcher] = []
        size, needs_engine = len(repr(spec)), spec.kind != "tools" or spec.tool_choice != "none"
        began = time.perf_counter()
        for copy in range(backend.num_copies if needs_engine else 0):
            is_of_use = copy < max(self._mask_threads, self._num_waiting.get(spec.key, 1))
            if copy == 0 or (is_of_use and time.perf_counter() - began < SLOW_SECONDS):
                engine, own_size = backend.compile(spec)
                engines.append(engine)
                size += own_size
        compiled = CompiledGrammar(spec, backend, engines, size, marker)
        compiled.matcher()  # the masks of its phases are made here and not on the loop
        with self._lock:
            self.stats.num_compiled += 1
            self.stats.compile_seconds += time.perf_counter() - started
        return compiled

    def _backend(self, name: str) -> Backend:
        with self._backend_lock:
            if name not in self._backends:
                made: Any = _backend_class(name)
                threads = (self._mask_threads,) if name == "llguidance" else ()
                self._backends[name] = made(self._vocabulary, *threads)
            return self._backends[name]

    def _keep(self, key: str, future: Future[CompiledGrammar]) -> None:
        with self._lock:
            if self._running.get(key) is future:
                del self._running[key], self._num_waiting[key]
            if future.cancelled() or future.exception() is not None:
                self.stats.num_failed += 1
                return
            compiled = future.result()
            if compiled.size_bytes > self._cache_bytes:
                return
            self._cache[key] = compiled
            self._cached_bytes += compiled.size_bytes
            while self._cached_bytes > self._cache_bytes:
                _, oldest = self._cache.popitem(last=False)
                self._cached_bytes -= oldest.size_bytes


def _library(spec: StructuredOutput) -> str:
    return "llguidance" if spec.backend == "auto" else spec.backend


def _backend_class(name: str) -> type[Backend]:
    """A library is imported only when it is used."""
    if importlib.util.find_spec(name) is None:
        raise InvalidRequest("backend", name, f"is not installed: pip install {name}")
    if name == "llguidance":
        from .backend_llguidance import LLGuidanceBackend

        return LLGuidanceBackend
    from .backend_xgrammar import XGrammarBackend

    return XGrammarBackend
