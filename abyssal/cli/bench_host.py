"""`abyssal bench host`: microseconds of Python in each decode step, with a model that computes nothing.

- `schedule_us`: which rows, blocks and slots the step gets;
- `prepare_us`: placing rows and gathering the flat inputs, with the released model's block tables and rings;
- `update_us`: tokens to requests, stops, outputs.

With overlapping steps, the first and the last of them pass while the step before is computed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from . import arguments


def register(kinds: Any) -> None:
    """Add the command."""
    parser = kinds.add_parser(
        "host",
        allow_abbrev=False,
        help="Python's share of a step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = arguments.positive_int
    parser.add_argument(
        "--requests", type=number, nargs="+", default=[1, 64, 256], metavar="N", help="decoding requests [1 64 256]"
    )
    parser.add_argument("--steps", type=number, default=200, metavar="N", help="steps of each measurement [200]")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    from rich.console import Console
    from rich.table import Table

    from ..engine.host_cost import measure_host

    costs = [measure_host(count, args.steps) for count in args.requests]
    table = Table(title="Microseconds of a decode step beside the model")
    for name in ("requests", "schedule", "prepare", "update", "total", "per request"):
        table.add_column(name, justify="right")
    for cost in costs:
        parts = (cost.schedule_us, cost.prepare_us, cost.update_us, cost.total_us, cost.total_us / cost.num_requests)
        table.add_row(str(cost.num_requests), *(f"{part:.1f}" for part in parts))
    Console(stderr=True).print(table)
    print(json.dumps([asdict(cost) | {"total_us": cost.total_us} for cost in costs]))
    return 0
