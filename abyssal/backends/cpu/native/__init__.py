"""Fused C++ kernels behind the CPU's op table.

`src/` is compiled when the package is installed (see setup.py), once for each instruction set, into libraries beside this
file; the best one that the processor can run is loaded. They need neither torch nor Python: tensors are passed as addresses.
Every result is the same for any number of threads and for any other rows in the call.
"""

from __future__ import annotations

import ctypes
import platform
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from . import kernels, sampling
from .sources import digest

VARIANTS = {
    "x86_64": (
        ("x86_64_v4", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}),
        ("x86_64_v3", {"avx2", "fma", "bmi2"}),
    ),
    "aarch64": (("aarch64", set[str]()),),
}
"""Libraries by machine, best first, and the processor flags that each needs."""


def library_path(variant: str) -> Path | None:
    """The library of an instruction set: beside this file, or where the package is installed if this is a checkout of it."""
    inside = Path(__package__.replace(".", "/")) / f"libabyssal_{variant}.so"
    roots = [Path(__file__).parents[4], *(Path(sysconfig.get_paths()[key]) for key in ("platlib", "purelib"))]
    return next((path for root in roots if (path := root / inside).is_file() and _is_current(path)), None)


@cache
def _is_current(path: Path) -> bool:
    """Whether a library was built from these sources. Anything else may not be called: its functions may differ."""
    sources = ctypes.CDLL(str(path)).abyssal_sources
    sources.restype = ctypes.c_char_p
    return bool(sources().decode() == digest())


def processor_flags() -> set[str]:
    """Instruction sets that the processor and the system offer, by the kernel's names."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())


def runnable_variants() -> list[str]:
    """Instruction sets of this processor that libraries are built for, best first."""
    flags = processor_flags()
    return [name for name, needed in VARIANTS.get(platform.machine(), ()) if needed <= flags]


@cache
def load(variant: str | None = None) -> ctypes.CDLL | None:
    """The library of an instruction set, or the best one that this processor runs; None if there is none."""
    for name in [variant] if variant else runnable_variants():
        path = library_path(name)
        if path is not None:
            library = ctypes.CDLL(str(path))
            _declare(library)
            return library
    return None


def why_missing() -> str:
    """Why `load` found nothing, for a message."""
    variants = runnable_variants()
    if not variants:
        return f"there is no native library for this processor ({platform.machine()}; x86-64 needs AVX2 and FMA)"
    return "no native library was built from these sources; install the package again where a C++ compiler is on PATH"


def entries(library: ctypes.CDLL, num_threads: int) -> dict[str, Callable[..., Any]]:
    """Entries of the op table.

    Args:
        num_threads: threads that the kernels of this process use from now on.
    """
    library.abyssal_set_num_threads(num_threads)
    return kernels.Kernels(library).entries() | sampling.SamplingKernels(library).entries()


def _declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the types of all functions."""
    for name, types in (kernels.SIGNATURES | sampling.SIGNATURES).items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
