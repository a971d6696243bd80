"""`abyssal plan` and `abyssal inspect`: what a model needs, and what it is made of, without loading it."""

from __future__ import annotations

import argparse
from typing import Any

from . import arguments


def register(commands: Any) -> None:
    """Add both commands."""
    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="memory a model needs",
        description="Show what a model needs and what fits.",
    )
    plan.set_defaults(run=run_plan)
    inspect = commands.add_parser(
        "inspect",
        allow_abbrev=False,
        help="layers, roles and tensors",
        description="Show a model's layers, roles and tensors.",
    )
    inspect.set_defaults(run=run_inspect)
    for parser in (plan, inspect):
        arguments.add_model(parser)
    arguments.add_engine(plan)


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan."""
    arguments.require_model(args)
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    """Print layers and tensors."""
    arguments.require_model(args)
    return 0
