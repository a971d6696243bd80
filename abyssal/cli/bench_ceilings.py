"""`abyssal bench ceilings`: what the card itself can do, which kernels are measured against."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any


def register(kinds: Any) -> None:
    """Add the command."""
    parser = kinds.add_parser(
        "ceilings",
        allow_abbrev=False,
        help="limits of the card",
        description="Copy rate, matrix products, transfers and launches of the current card. Takes some seconds and 10 GB.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and show.

    Raises:
        UnsupportedOnBackend: there is no card, or no kernels for it.
    """
    from rich.console import Console
    from rich.table import Table

    from ..backends.cuda.build import architecture
    from ..backends.cuda.ceilings import measure_ceilings

    architecture()
    found = measure_ceilings()
    table = Table(title=f"{found.device}, {found.processors} processors")
    table.add_column("what")
    table.add_column("measured", justify="right")
    rows = (
        ("copy within the card", f"{found.copy / 1e12:.2f} TB/s"),
        ("bf16 products", f"{found.bf16 / 1e12:.0f} TFLOP/s"),
        ("fp8 products", f"{found.fp8 / 1e12:.0f} TFLOP/s"),
        ("host to card", f"{found.host_to_card / 1e9:.1f} GB/s"),
        ("launch of a kernel", f"{found.launch_seconds * 1e6:.1f} us"),
        ("node of a graph", f"{found.graph_node_seconds * 1e6:.2f} us"),
    )
    for row in rows:
        table.add_row(*row)
    Console(stderr=True).print(table)
    print(json.dumps(asdict(found)))
    return 0
