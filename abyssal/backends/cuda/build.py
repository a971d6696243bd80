"""Kernel sources to shared libraries, at run time.

Each `csrc/*.cu` becomes one library with C functions, called through ctypes with raw pointers. No torch headers are
involved, so that a build takes seconds. Results are kept under the cache folder by a hash of sources, flags and compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ...config.env import cache_dir
from ...core.errors import UnsupportedOnBackend

SOURCES = Path(__file__).parent / "csrc"
NVCC_PLACES = ("/usr/local/cuda/bin/nvcc",)
ARCHITECTURES = {(9, 0): "90a"}
"""Code targets by compute capability."""

LIBRARIES: dict[str, dict[str, str]] = {
    "gemm_fp4": {"gemm": "p"},
    "gemm_fp4_large": {"gemm": "p"},
    "gemm_fp8": {"gemm": "p"},
    "gemm_bf16": {"gemm": "p"},
    "repack": {"repack": "ppppiiipiip"},
    "moe": {"route": "pipiiifpp", "sort_pairs": "ppiiippppp", "gather_rows": "ppiiiipp", "combine_rows": "pppiiip"},
    "rows": {"round_rows_fp8": "ppli", "linear_f32": "pppiiii"},
}
"""Sources, and the functions of each with the types of their arguments: pointer, int, long, float. A stream follows."""

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}


class Library:
    """The functions of one source. Each call raises RuntimeError with CUDA's text if the launch fails."""

    def __init__(self, path: Path, functions: dict[str, str]) -> None:
        self._loaded = ctypes.CDLL(str(path))
        self._loaded.describe_error.restype = ctypes.c_char_p
        self._functions: dict[str, Any] = {}
        for name, signature in functions.items():
            function = getattr(self._loaded, name)
            function.argtypes = [*(_TYPES[kind] for kind in signature), ctypes.c_void_p]
            function.restype = ctypes.c_int
            self._functions[name] = function

    def call(self, name: str, *arguments: object) -> None:
        """Run a function on the current stream."""
        code = self._functions[name](*arguments, torch.cuda.current_stream().cuda_stream)
        if code:
            raise RuntimeError(f"CUDA kernel {name}: {self._loaded.describe_error(code).decode()} (error {code})")


def find_nvcc() -> str | None:
    """The CUDA compiler on the search path or in its usual place."""
    found = shutil.which("nvcc")
    return found or next((place for place in NVCC_PLACES if os.access(place, os.X_OK)), None)


def architecture() -> str:
    """Code target of the current card.

    Raises:
        UnsupportedOnBackend: there is no card, or no kernels for it.
    """
    if not torch.cuda.is_available():
        raise UnsupportedOnBackend("backend cuda: torch sees no NVIDIA card here")
    capability = torch.cuda.get_device_capability()
    if capability not in ARCHITECTURES:
        have = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise UnsupportedOnBackend(
            f"backend cuda: {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; "
            f"there are kernels for {have}"
        )
    return ARCHITECTURES[capability]


def compile_library(name: str, target: str, folder: Path) -> Path:
    """Compile `csrc/<name>.cu` for a code target, unless `folder` holds it already.

    Raises:
        UnsupportedOnBackend: without a compiler.
        RuntimeError: with the compiler's output.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise UnsupportedOnBackend("backend cuda needs nvcc (CUDA 12.8 or newer) on PATH to build its kernels")
    flags = _flags(target)
    path = folder / f"{name}-{_digest(name, nvcc, flags)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    done = subprocess.run(
        [nvcc, *flags, str(SOURCES / f"{name}.cu"), "-o", temporary], capture_output=True, text=True, check=False
    )
    if done.returncode:
        Path(temporary).unlink()
        raise RuntimeError(f"nvcc could not compile {name}.cu:\n{done.stdout}{done.stderr}")
    os.replace(temporary, path)  # several processes may build at once
    return path


def _flags(target: str) -> Sequence[str]:
    code = f"-gencode=arch=compute_{target},code=sm_{target}"
    return ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC,-fno-gnu-unique", code)


def _digest(name: str, nvcc: str, flags: Sequence[str]) -> str:
    state = hashlib.sha256(_version(nvcc).encode())
    state.update(" ".join(flags).encode())
    for source in sorted([SOURCES / f"{name}.cu", *SOURCES.glob("*.cuh")]):
        state.update(source.read_bytes())
    return state.hexdigest()[:16]


@functools.cache
def _version(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def library(name: str) -> Library:
    """A library, built if need be."""
    return Library(compile_library(name, architecture(), cache_dir() / "cuda"), LIBRARIES[name])


def build_all() -> None:
    """Build everything at once, so that no first request waits for a compiler."""
    target, folder = architecture(), cache_dir() / "cuda"
    with ThreadPoolExecutor(len(LIBRARIES)) as pool:
        list(pool.map(lambda name: compile_library(name, target, folder), LIBRARIES))
