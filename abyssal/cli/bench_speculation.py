"""`abyssal bench speculation`: what drafting gains, by concurrency: off, a fixed number of drafts, and auto.

The workload is that of `abyssal bench offline`, run once for each number of requests in flight and each setting of
`speculation`. Settings take turns, `--repeats` times over, in turning order.

- `tok/s` is `decode_tok_s` of `bench offline`: tokens drawn in full decode steps, over their time. The best run counts,
  because other work on the machine only ever slows a run down.
- `a user` is that divided by the requests in flight, and `tokens a step` the tokens that a request gets in a step.
- `against off` is the median over the turns of the speed against that of `off` in the same turn: a second opinion where the
  machine is busy.
- `calibration error` compares the drafter's confidences with what was accepted, place by place.

With random weights nearly no draft is accepted. `--simulate-acceptance 0.8` keeps each draft with that probability, whatever
the model would draw: speeds are then those of a drafter of that quality, and the text means nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config.engine import EngineConfig
from ..core.errors import ConfigError
from . import arguments
from .plot import Curve, draw_svg, draw_text

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..scheduler.acceptance import SpeculationStats

DEFAULT_CONCURRENCY = (1, 2, 4, 8, 16, 32)
WARMUP_TOKENS = 32


@dataclass(frozen=True)
class Point:
    """One setting at one concurrency.

    Attributes:
        total_tok_s: of all requests together.
        stats: of the run's drafts; None with speculation off.
        against_off: its speed over that of `off`; None if that was not run.
    """

    speculation: str
    concurrency: int
    total_tok_s: float
    stats: SpeculationStats | None
    against_off: float | None = None

    @property
    def user_tok_s(self) -> float:
        return self.total_tok_s / self.concurrency

    @property
    def tokens_per_step(self) -> float:
        return (self.stats.tokens_per_step or 1.0) if self.stats is not None else 1.0

    def record(self) -> dict[str, Any]:
        """For JSON."""
        figures = {
            "total_tok_s": round(self.total_tok_s, 3),
            "user_tok_s": round(self.user_tok_s, 3),
            "against_off": None if self.against_off is None else round(self.against_off, 4),
            "tokens_per_step": round(self.tokens_per_step, 4),
        }
        places = [] if self.stats is None else [asdict(place) for place in self.stats.places]
        return {"speculation": self.speculation, "concurrency": self.concurrency, **figures, "places": places}


def register(kinds: Any) -> None:
    """Add the kind to `abyssal bench`."""
    parser = kinds.add_parser(
        "speculation",
        allow_abbrev=False,
        help="drafts on and off, by concurrency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = arguments.positive_int
    parser.add_argument(
        "--concurrency", type=number, nargs="+", default=list(DEFAULT_CONCURRENCY), metavar="C", help="requests in flight"
    )
    parser.add_argument(
        "--speculations", nargs="+", metavar="S", help="settings to compare [off, 1 up to the model's block, auto]"
    )
    parser.add_argument("--input-len", type=number, default=64, metavar="A", help="prompt tokens of each request [64]")
    parser.add_argument("--output-len", type=number, default=64, metavar="B", help="generated tokens of each request [64]")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="sampling temperature [0]")
    parser.add_argument("--repeats", type=number, default=1, metavar="N", help="runs of each setting; the best counts [1]")
    parser.add_argument("--simulate-acceptance", type=_share, metavar="P", help="keep each draft with this probability")
    parser.add_argument("--plot", metavar="FILE.svg", help="write the plot as SVG too")
    arguments.add_model(parser)
    arguments.add_engine(parser, skip=("speculation",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sweep, and report.

    Raises:
        ConfigError: before anything is measured, if the arguments do not go together or with the model.
    """
    model = arguments.require_model(args)
    args.concurrency = list(dict.fromkeys(args.concurrency))
    most = max(args.concurrency)
    settings = {"max_num_seqs": most, "seed": 0, **arguments.given(args, EngineConfig, skip=("speculation",))}
    if settings["max_num_seqs"] < most:
        raise ConfigError(f"max_num_seqs={settings['max_num_seqs']}: must be at least {most}, the largest --concurrency")
    if args.plot is not None:
        arguments.check_output("--plot", Path(args.plot))
    from ..engine.engine import Engine

    engine = Engine(model, EngineConfig(speculation=1, **settings), revision=args.revision, assume_yes=args.yes)
    try:
        args.speculations = _settings(engine, args.speculations)
        points = sweep(engine, args)
    finally:
        engine.close()
    _report(model, engine, args, points)
    return 0


def sweep(engine: Engine, args: argparse.Namespace) -> list[Point]:
    """All points, by concurrency, then in the order of the settings."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    speculations, points = args.speculations, []
    num_runs = len(args.concurrency) * len(speculations) * args.repeats
    with tqdm(total=num_runs, desc="Runs", unit="run", dynamic_ncols=True) as bar:
        for concurrency in args.concurrency:
            turns: list[dict[str, Point]] = []
            for turn in range(args.repeats):
                turns.append({})
                for speculation in reversed(speculations) if turn % 2 else speculations:
                    turns[-1][speculation] = _measure(engine, speculation, concurrency, args)
                    bar.update(1)
            points += [_summary([turn[speculation] for turn in turns], turns) for speculation in speculations]
    return points


def _summary(runs: Sequence[Point], turns: Sequence[dict[str, Point]]) -> Point:
    """The best run of a setting, and how it fares against `off` in the same turns."""
    best = max(runs, key=lambda run: run.total_tok_s)
    beside = [turn["off"].total_tok_s for turn in turns if "off" in turn]
    if not beside or not all(beside):
        return best
    ratios = [run.total_tok_s / off for run, off in zip(runs, beside, strict=True)]
    return replace(best, against_off=statistics.median(ratios))


def _settings(engine: Engine, asked: Sequence[str] | None) -> list[str]:
    """The settings to compare, each once.

    Raises:
        ConfigError: for one that means nothing, or is beyond the model's block.
    """
    from ..engine.drafts import check_speculation

    text = engine.model_config.text
    settings = asked or ["off", *map(str, range(1, text.dspark_block_size + 1)), "auto"]
    for setting in settings:
        check_speculation(text, replace(engine.config, speculation=setting))
    return list(dict.fromkeys(settings))


def _measure(engine: Engine, speculation: str, concurrency: int, args: argparse.Namespace) -> Point:
    from .bench import OfflineWorkload, measure

    workload = OfflineWorkload(args.input_len, args.output_len, concurrency, concurrency, args.temperature, seed=1)
    engine.set_speculation(speculation)
    if args.simulate_acceptance is not None:
        engine.simulate_acceptance(args.simulate_acceptance)
    # long enough for `auto` to have found out what drafts are worth
    measure(engine, replace(workload, output_len=WARMUP_TOKENS, seed=2))
    result = measure(engine, workload)
    return Point(str(speculation), concurrency, result.decode_tok_s or 0.0, engine.stats.speculation)


def _share(text: str) -> float:
    """A probability, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, not {text}")
    return value


def _report(model: str, engine: Engine, args: argparse.Namespace, points: Sequence[Point]) -> None:
    """Tables and a plot for people, then one line of JSON for programs."""
    from rich.console import Console

    console = Console()
    console.print(_speeds(points))
    console.print(_places(points))
    curves = [
        Curve(speculation, [(p.user_tok_s, p.total_tok_s) for p in points if p.speculation == speculation])
        for speculation in dict.fromkeys(p.speculation for p in points)
    ]
    labels = ("tok/s a user", "tok/s in all")
    print(draw_text(curves, *labels))
    if args.plot is not None:
        Path(args.plot).write_text(draw_svg(curves, *labels), encoding="utf-8")
        print(f"{args.plot}: the plot")
    workload = {name: getattr(args, name) for name in ("input_len", "output_len", "temperature", "simulate_acceptance")}
    setup = {name: getattr(engine.config, name) for name in ("numerics", "weights", "backend", "num_threads", "acceptance")}
    origin = {"model": model, "version": __version__}
    print(json.dumps({"points": [p.record() for p in points], **workload, **setup, **origin}))


def _speeds(points: Sequence[Point]) -> Any:
    from rich.table import Table

    table = Table(title="Decode speed")
    for name in ("in flight", "speculation", "tok/s", "a user", "against off", "tokens a step"):
        table.add_column(name, justify="right")
    for previous, p in zip([None, *points], points, strict=False):
        if previous is not None and previous.concurrency != p.concurrency:
            table.add_section()
        ratio = "-" if p.against_off is None else f"{p.against_off:.2f}x"
        speeds = (f"{p.total_tok_s:,.1f}", f"{p.user_tok_s:,.1f}", ratio, f"{p.tokens_per_step:.2f}")
        table.add_row(str(p.concurrency), p.speculation, *speeds)
    return table


def _places(points: Sequence[Point]) -> Any:
    """Drafts by place, over all runs with a fixed number of them: those of `auto` are chosen by confidence."""
    from rich.table import Table

    table = Table(title="Drafts of the largest fixed number, all concurrencies")
    for name in ("place", "verified", "accepted", "calibration error"):
        table.add_column(name, justify="right")
    fixed = [p for p in points if p.speculation.isdigit()]
    largest = max((int(p.speculation) for p in fixed), default=0)
    stats = [p.stats for p in fixed if int(p.speculation) == largest and p.stats is not None]
    for place in range(largest):
        cells = [s.places[place] for s in stats]
        verified = sum(cell.verified for cell in cells)
        accepted = sum(cell.accepted for cell in cells)
        errors = [(cell.verified, cell.calibration_error) for cell in cells if cell.calibration_error is not None]
        error = sum(count * value for count, value in errors) / max(1, sum(count for count, _ in errors))
        share = f"{100 * accepted / verified:.1f}%" if verified else "-"
        table.add_row(str(place + 1), str(verified), share, f"{100 * error:.1f}%" if errors else "-")
    return table
