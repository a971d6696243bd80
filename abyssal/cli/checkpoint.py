"""`abyssal make-checkpoint`: write a small random model in the released format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError

PRESETS = ("micro", "deep")


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "make-checkpoint",
        allow_abbrev=False,
        help="write a small random model",
        description="Write a random model in the released format: the same files, tensor names and dtypes, but small.",
    )
    parser.add_argument("directory", metavar="DIR", help="folder to write; made if absent")
    parser.add_argument(
        "--preset", choices=PRESETS, default="micro", help="micro: 8 layers; deep: the released 40 layers, narrow [micro]"
    )
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="seed of the weights [7]")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, unless something is there already."""
    folder = Path(args.directory)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another or empty it")
    from ..loading.random_checkpoint import write_random_checkpoint

    write_random_checkpoint(folder, args.preset, seed=args.seed)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {args.preset}, seed {args.seed}, {size / 2**20:.1f} MiB")
    return 0
