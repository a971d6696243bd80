"""`abyssal calibrate`: fit the temperatures of the drafter's confidences and store them beside the model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.engine import EngineConfig
from ..core.errors import ConfigError
from ..core.sampling_params import SamplingParams
from . import arguments

if TYPE_CHECKING:
    from ..scheduler.calibration import Calibration

DESCRIPTION = """\
Let the model generate text with drafts, compare the drafter's confidences with what was accepted, and fit one temperature
for each place in a draft block. They are stored beside the model (draft_calibration.json), apart for each kind of
acceptance, and used by speculation=auto from then on. Output does not depend on them."""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "calibrate",
        allow_abbrev=False,
        help="fit the confidences of drafts",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = arguments.positive_int
    parser.add_argument("--prompt-file", metavar="FILE", help="one prompt a line [the model begins by itself]")
    parser.add_argument("--num-prompts", type=number, default=64, metavar="N", help="texts, without --prompt-file [64]")
    parser.add_argument("--output-len", type=number, default=128, metavar="B", help="generated tokens of each text [128]")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="sampling temperature [1]")
    parser.add_argument("--out", metavar="FILE", help="where to store the result [beside the model]")
    arguments.add_model(parser)
    arguments.add_engine(parser, skip=("speculation",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate, fit, store, show.

    Raises:
        AbyssalError: before anything is generated, if a prompt cannot be used or the result could not be stored.
    """
    model = arguments.require_model(args)
    settings = {"seed": 0, **arguments.given(args, EngineConfig, skip=("speculation",))}
    prompts = None if args.prompt_file is None else _lines(Path(args.prompt_file))
    out = None if args.out is None else Path(args.out)
    if out is not None:
        arguments.check_output("--out", out)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.output_len, detokenize=False)
    from tqdm import tqdm  # type: ignore[import-untyped]

    from ..engine.calibrate import calibrate, collect_drafts, default_path
    from ..engine.engine import Engine

    config = EngineConfig(speculation=1, **settings)
    engine = Engine(model, config, revision=args.revision, assume_yes=args.yes)
    try:
        out = out or default_path(engine)
        arguments.check_output("--out", out)
        begun: list[str | list[int]] = list(prompts or [])
        begun = begun or [[engine.model_config.bos_token_id] for _ in range(args.num_prompts)]
        with tqdm(total=len(begun), desc="Texts", unit="text", dynamic_ncols=True) as bar:
            drafts = collect_drafts(engine, begun, params, bar.update)
        fitted = calibrate(engine, drafts, out)
    finally:
        engine.close()
    _show(fitted)
    print(f"{out}: temperatures for acceptance={config.acceptance}")
    return 0


def _lines(path: Path) -> list[str]:
    """Prompts of a file.

    Raises:
        ConfigError: if it cannot be read, or holds none.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"--prompt-file {path} holds no prompt")
    return lines


def _show(fitted: Calibration) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Calibration error of the drafter's confidences")
    for name in ("place", "drafts", "temperature", "as it comes", "calibrated"):
        table.add_column(name, justify="right")
    columns = (fitted.num_drafts, fitted.temperatures, fitted.error_before, fitted.error_after)
    for place, (count, temperature, before, after) in enumerate(zip(*columns, strict=True), 1):
        errors = ["-" if error is None else f"{100 * error:.1f}%" for error in (before, after)]
        table.add_row(str(place), str(count), f"{temperature:.2f}", *errors)
    Console().print(table)
