"""`abyssal doctor`: what there is to run on, which versions, and who implements each op."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import env
from ..config.engine import EngineConfig
from ..plan.machine import Machine
from ..plan.units import readable
from . import arguments

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "deepseek-recipe", "huggingface_hub")
CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")

Rows = list[tuple[str, str]]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="what is installed and used",
        description="Show versions, the machine, the backend and its ops.",
    )
    shown = ("backend", "device", "num_threads")
    arguments.add_engine(parser, skip=[name for name in arguments.field_help(EngineConfig) if name not in shown])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    _print_table("versions", versions())
    _print_table("machine", machine())
    config = EngineConfig(**arguments.given(args, EngineConfig))
    from ..backends.cpu.table import cpu_table
    from ..ops.invariance import varying_ops
    from ..ops.registry import explain

    threads = config.num_threads or Machine.this().num_processors
    if config.device == "cuda":
        from ..backends.cuda.table import cuda_table

        table = cuda_table(threads, invariant=config.invariant)
    else:
        table = cpu_table(config.backend, threads)
    _print_table(f"{config.device}, {threads} threads of the host: op and who implements it", explain(table))
    varying = varying_ops(table, config.device)
    _print_table("row invariance", [("start-up test", f"fails: {', '.join(varying)} vary" if varying else "holds")])
    return 0


def versions() -> Rows:
    """Of the package, Python, and what it stands on."""
    return [("abyssal", __version__), ("python", sys.version.split()[0]), *((name, _version(name)) for name in PACKAGES)]


def machine() -> Rows:
    """System, processor, memory and caches."""
    import torch

    here = Machine.this()
    return [
        ("system", platform.platform()),
        ("processor", _cpu_info("model name") or platform.machine()),
        ("processors usable", f"{here.num_processors} of {os.cpu_count()}"),
        ("torch vectors", torch.backends.cpu.get_cpu_capability()),
        ("cpu features", " ".join(f for f in CPU_FEATURES if f in cpu_flags()) or "unknown"),
        ("torch threads", str(torch.get_num_threads())),
        ("memory usable", readable(here.memory_bytes)),
        ("cuda", ", ".join(_cuda_devices()) or "none"),
        ("cache folder", str(env.cache_dir())),
    ]


def cpu_flags() -> frozenset[str]:
    """Instruction set names as the system spells them."""
    return frozenset((_cpu_info("flags") or _cpu_info("Features") or "").split())


def _cpu_info(key: str) -> str | None:
    return next((value for name, value in _colon_lines(Path("/proc/cpuinfo")) if name == key), None)


def _colon_lines(path: Path) -> Iterable[tuple[str, str]]:
    if path.exists():
        for line in path.read_text().splitlines():
            name, colon, value = line.partition(":")
            if colon:
                yield name.strip(), value.strip()


def _cuda_devices() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _print_table(title: str, rows: Rows) -> None:
    width = max(len(name) for name, _ in rows)
    print(f"{title}")
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    print()
