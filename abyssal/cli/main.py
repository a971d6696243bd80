"""Entry point of the command line: parses, dispatches, and turns errors into one message and an exit status.

Exit status: 0 done; 1 a plan does not fit; 2 wrong input (one message on stderr, no traceback); 130 interrupted; 141 the
reader of the output left.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..config import env
from ..core.errors import AbyssalError
from . import batch, bench, calibrate, chat, checkpoint, doctor, generate, logits, plan

COMMANDS = (generate, chat, batch, logits, bench, calibrate, plan, checkpoint, doctor)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="abyssal",
        allow_abbrev=False,
        description="Inference for DeepSeek-V4.1-Flash.",
        epilog="`abyssal COMMAND --help` lists the flags of a command.",
    )
    parser.add_argument("--version", action="version", version=f"abyssal {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Wrong flags raise SystemExit, as argparse does."""
    args = build_parser().parse_args(argv)
    env.prepare_process()
    try:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("abyssal").setLevel(env.log_level().upper())
        status: int = args.run(args)
        sys.stdout.flush()
    except AbyssalError as error:
        if env.debug():
            raise
        print(f"abyssal: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # What is still buffered would fail again when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if env.debug() or error.filename is None:
            raise
        print(f"abyssal: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return status
