"""`abyssal bench offline`: speed of the engine on random prompts, without text.

C requests are kept in flight until N are done; each has A prompt tokens and generates B tokens, EOS ignored. Measured from
the outside of `Engine.step`:

- `prefill_tok_s`: the C * A prompt tokens of the first wave, divided by the time from adding its first request until every
  one of them has its first token. Decode rows that share steps with the wave's later prompts are in that time.
- `decode_tok_s`: tokens drawn in full decode steps, divided by their time. A full decode step is one before which all C
  requests are in flight and have their first token. If there was none (B is so small that the wave's first request ends
  before its last one begins), steps in which every request in flight, however few, has its first token.
- `ttft_ms`: from adding a request to the end of the step that gave its first token; mean over all requests.
- `tpot_ms`: from the first token to the last one, divided by B - 1; mean over all requests.
- `peak_memory_bytes`: the most resident memory of the process since its start, mapped pages of the checkpoint included.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config.engine import EngineConfig
from ..core.errors import AbyssalError, ConfigError
from ..core.sampling_params import SamplingParams
from . import arguments, bench_ceilings, bench_host, bench_speculation

if TYPE_CHECKING:
    from ..engine.engine import Engine

WARMUP_OUTPUT_TOKENS = 4
REPORTED_SETTINGS = ("numerics", "weights", "backend", "num_threads", "max_num_batched_tokens")


@dataclass(frozen=True)
class OfflineWorkload:
    """What is run.

    Attributes:
        input_len, output_len: tokens of each request.
        concurrency: requests in flight.
        num_prompts: requests in all.
    """

    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class OfflineResult:
    """What was measured; the module's docstring defines each figure. None where there was nothing to measure."""

    prefill_tok_s: float
    decode_tok_s: float | None
    ttft_ms: float
    tpot_ms: float | None
    ttft_ms_max: float
    tpot_ms_max: float | None
    elapsed_s: float
    total_tok_s: float


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("bench", allow_abbrev=False, help="measure speed", description="Measure speed.")
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    offline = kinds.add_parser(
        "offline",
        allow_abbrev=False,
        help="random prompts in this process",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = arguments.positive_int
    offline.add_argument("--input-len", type=number, default=256, metavar="A", help="prompt tokens of each request [256]")
    offline.add_argument("--output-len", type=number, default=64, metavar="B", help="generated tokens of each request [64]")
    offline.add_argument("--concurrency", type=number, default=1, metavar="C", help="requests in flight [1]")
    offline.add_argument("--num-prompts", type=number, metavar="N", help="requests in all [C]")
    offline.add_argument("--temperature", type=float, default=0.0, metavar="X", help="sampling temperature [0]")
    arguments.add_model(offline)
    arguments.add_engine(offline)
    offline.set_defaults(run=run)
    bench_speculation.register(kinds)
    bench_ceilings.register(kinds)
    bench_host.register(kinds)


def run(args: argparse.Namespace) -> int:
    """Load, warm up, measure, report."""
    model = arguments.require_model(args)
    settings = {"max_num_seqs": args.concurrency, "seed": 0, **arguments.given(args, EngineConfig)}
    config = EngineConfig(**settings)
    num_prompts = args.num_prompts or args.concurrency
    if num_prompts < args.concurrency:
        raise ConfigError(f"num_prompts={num_prompts}: must be at least concurrency={args.concurrency}")
    workload = OfflineWorkload(
        args.input_len, args.output_len, args.concurrency, num_prompts, args.temperature, config.seed or 0
    )
    from ..engine.engine import Engine

    engine = Engine(model, config, revision=args.revision, assume_yes=args.yes)
    try:
        warm_up(engine, workload)
        result = _measure_with_progress(engine, workload)
    finally:
        engine.close()
    _report(model, engine, workload, result)
    return 0


def warm_up(engine: Engine, workload: OfflineWorkload) -> None:
    """Run one request of the workload's prompt length, so that nothing is built or paged in while it is measured."""
    output_len = min(workload.output_len, WARMUP_OUTPUT_TOKENS)
    once = OfflineWorkload(workload.input_len, output_len, 1, 1, workload.temperature, workload.seed + 1)
    measure(engine, once)


def measure(
    engine: Engine,
    workload: OfflineWorkload,
    *,
    clock: Callable[[], float] = time.perf_counter,
    advance: Callable[[int], None] = lambda tokens: None,
) -> OfflineResult:
    """Run a workload on an idle engine.

    Args:
        clock: seconds.
        advance: called after each step with the number of tokens it drew.

    Raises:
        AbyssalError: if a request is refused or fails.
    """
    run = _Run(engine, workload, clock)
    while run.requests_left:
        run.fill()
        advance(run.step())
    return run.result()


@dataclass
class _Timing:
    """One request: when it was added, and what it generated since."""

    added: float
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0


@dataclass
class _Steps:
    """Steps of one kind."""

    seconds: float = 0.0
    tokens: int = 0

    @property
    def tok_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens else None


@dataclass
class _Run:
    """The state of a measurement."""

    engine: Engine
    workload: OfflineWorkload
    clock: Callable[[], float]
    in_flight: dict[str, _Timing] = field(default_factory=dict)
    done: list[_Timing] = field(default_factory=list)
    wave: list[_Timing] = field(default_factory=list)
    full_decode: _Steps = field(default_factory=_Steps)
    any_decode: _Steps = field(default_factory=_Steps)

    def __post_init__(self) -> None:
        config, workload = self.engine.model_config, self.workload
        reserved = {config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id}
        self._vocabulary = [i for i in range(config.text.vocab_size) if i not in reserved]
        self._random = random.Random(workload.seed)
        self._params = SamplingParams(
            temperature=workload.temperature, max_tokens=workload.output_len, ignore_eos=True, detokenize=False
        )
        self._num_added = 0
        self._started = self._ended = 0.0

    @property
    def requests_left(self) -> bool:
        return len(self.done) < self.workload.num_prompts

    def fill(self) -> None:
        """Add requests until as many are in flight as should be."""
        while self._num_added < self.workload.num_prompts and len(self.in_flight) < self.workload.concurrency:
            prompt = self._random.choices(self._vocabulary, k=self.workload.input_len)
            timing = _Timing(self.clock())
            if not self._num_added:
                self._started = timing.added
            if self._num_added < self.workload.concurrency:
                self.wave.append(timing)
            self.in_flight[self.engine.add(prompt, self._params)] = timing
            self._num_added += 1

    def step(self) -> int:
        """Run one step and book its time and tokens. Returns the number of tokens drawn."""
        decodes_only = all(t.first is not None for t in self.in_flight.values())
        is_full = decodes_only and len(self.in_flight) == self.workload.concurrency
        begin = self.clock()
        outputs = self.engine.step()
        end = self._ended = self.clock()
        drawn = 0
        for output in outputs:
            if output.error is not None:
                raise AbyssalError(f"request {output.request_id} failed: {output.error}")
            timing = self.in_flight[output.request_id]
            fresh = len(output.outputs[0].token_ids) - timing.num_tokens
            timing.num_tokens += fresh
            timing.first = end if timing.first is None and fresh else timing.first
            timing.last = end
            drawn += fresh
            if output.finished:
                self.done.append(self.in_flight.pop(output.request_id))
        for steps, counts in ((self.any_decode, decodes_only), (self.full_decode, is_full)):
            if counts:
                steps.seconds += end - begin
                steps.tokens += drawn
        return drawn

    def result(self) -> OfflineResult:
        workload = self.workload
        wave_end = max(t.first or 0.0 for t in self.wave)
        waits = [1e3 * ((t.first or 0.0) - t.added) for t in self.done]
        paces = [1e3 * (t.last - (t.first or 0.0)) / (t.num_tokens - 1) for t in self.done if t.num_tokens > 1]
        elapsed = self._ended - self._started
        return OfflineResult(
            prefill_tok_s=workload.concurrency * workload.input_len / (wave_end - self._started),
            decode_tok_s=self.full_decode.tok_s or self.any_decode.tok_s,
            ttft_ms=statistics.fmean(waits),
            tpot_ms=statistics.fmean(paces) if paces else None,
            ttft_ms_max=max(waits),
            tpot_ms_max=max(paces, default=None),
            elapsed_s=elapsed,
            total_tok_s=workload.num_prompts * (workload.input_len + workload.output_len) / elapsed,
        )


def peak_memory_bytes() -> int:
    """The most resident memory of this process so far."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _measure_with_progress(engine: Engine, workload: OfflineWorkload) -> OfflineResult:
    from tqdm import tqdm  # type: ignore[import-untyped]

    total = workload.num_prompts * workload.output_len
    with tqdm(total=total, desc="Generated tokens", unit="tok", dynamic_ncols=True) as bar:
        return measure(engine, workload, advance=bar.update)


def _report(model: str, engine: Engine, workload: OfflineWorkload, result: OfflineResult) -> None:
    """A table for people, then one line of JSON for programs."""
    from rich.console import Console
    from rich.table import Table

    peak = peak_memory_bytes()
    tpot = "-" if result.tpot_ms is None else f"{result.tpot_ms:,.2f} ms, at most {result.tpot_ms_max:,.2f}"
    rows = [
        ("prefill", f"{result.prefill_tok_s:,.1f} tok/s"),
        ("decode", "-" if result.decode_tok_s is None else f"{result.decode_tok_s:,.1f} tok/s"),
        ("time to first token", f"{result.ttft_ms:,.1f} ms, at most {result.ttft_ms_max:,.1f}"),
        ("time per output token", tpot),
        ("in all", f"{result.elapsed_s:,.2f} s, {result.total_tok_s:,.1f} tok/s of prompt and output"),
        ("peak memory", f"{peak / 2**20:,.0f} MiB"),
    ]
    lengths = f"{workload.input_len} in, {workload.output_len} out"
    table = Table(title=f"{workload.num_prompts} x ({lengths}), {workload.concurrency} at a time", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)
    figures = {name: value if value is None else round(value, 3) for name, value in asdict(result).items()}
    setup = {name: getattr(engine.config, name) for name in REPORTED_SETTINGS}
    origin = {"model": model, "version": __version__}
    print(json.dumps({**figures, "peak_memory_bytes": peak, **asdict(workload), **setup, **origin}))
