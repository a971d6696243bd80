"""`abyssal plan` and `abyssal inspect`: what a model needs, and what it is made of, from its configuration alone."""

from __future__ import annotations

import argparse
from typing import Any

from ..config.engine import EngineConfig
from . import arguments


def register(commands: Any) -> None:
    """Add both commands."""
    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="memory a model needs and what fits",
        description="Show what a model and its caches need and what fits. Exit status 1 if it does not fit.",
    )
    plan.add_argument(
        "--memory", type=arguments.parse_bytes, metavar="BYTES", help="of the host, or of each device [free now]"
    )
    plan.add_argument("--devices", type=arguments.positive_int, metavar="N", help="accelerators that share the model [none]")
    arguments.add_engine(plan)
    plan.set_defaults(run=run_plan)
    inspect = commands.add_parser(
        "inspect",
        allow_abbrev=False,
        help="layers, roles and tensors of a model",
        description="Show the layers of a model with their roles, and its tensors by kind.",
    )
    inspect.set_defaults(run=run_inspect)
    for parser in (plan, inspect):
        parser.add_argument(
            "--model", metavar="MODEL", help="a folder, a config.json, a hub id, or `flash`; no weights are read"
        )
        parser.add_argument("--revision", help="branch, tag or commit of a model from the hub")
        parser.add_argument("--json", action="store_true", help="one JSON object")


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan; 1 if the model does not fit."""
    model = arguments.require_model(args)
    config = EngineConfig(**arguments.given(args, EngineConfig))
    from ..loading.resolve import resolve_config
    from ..plan.render import print_plan

    plan = print_plan(
        resolve_config(model, revision=args.revision),
        config,
        memory_bytes=args.memory,
        num_devices=args.devices or 0,
        as_json=args.json,
    )
    return 1 if plan.shortfall > 0 else 0


def run_inspect(args: argparse.Namespace) -> int:
    """Print layers and tensors."""
    model = arguments.require_model(args)
    from ..loading.resolve import resolve_config
    from ..plan.render import print_inspect

    print_inspect(resolve_config(model, revision=args.revision), as_json=args.json)
    return 0
