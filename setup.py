"""Compiles the CPU kernels when the package is built. Everything else is in pyproject.toml.

The libraries need neither torch nor Python, so building takes a C++ compiler and nothing from a registry. Without a
compiler the package installs all the same and runs in plain torch; `abyssal doctor` says so.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

NATIVE = Path("abyssal/backends/cpu/native")
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread"]


def _sources_digest() -> str:
    """What `abyssal.backends.cpu.native.sources.digest` says, without importing the package."""
    spec = importlib.util.spec_from_file_location("sources", NATIVE / "sources.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.digest()


VARIANTS = {
    "x86_64": {"x86_64_v3": ["-march=x86-64-v3"], "x86_64_v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"]},
    "aarch64": {"aarch64": []},
}
"""Compiler flags of each library, by machine. The names are those that abyssal.backends.cpu.native looks for."""


class BuildNative(build_ext):
    """Builds one library for each instruction set; a missing or failing compiler is only a warning."""

    def build_extension(self, ext: Extension) -> None:
        target = self._folder(self.build_lib)
        target.mkdir(parents=True, exist_ok=True)
        compiler = self._compiler()
        variants = VARIANTS.get(platform.machine(), {})
        if compiler is None or not variants:
            self._skip("no C++ compiler was found" if variants else f"there are none for {platform.machine()}")
            return
        define = f'-DABYSSAL_SOURCES="{_sources_digest()}"'
        for name, flags in variants.items():
            command = [compiler, *FLAGS, *flags, define, *sorted(ext.sources), "-o", str(target / f"libabyssal_{name}.so")]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                self._skip(f"{' '.join(command)}\n{result.stderr}")

    def copy_extensions_to_source(self) -> None:
        """For an editable install: the libraries beside their Python sources."""
        for library in self._folder(self.build_lib).glob("libabyssal_*.so"):
            shutil.copy2(library, NATIVE)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self._folder(self.build_lib).glob("libabyssal_*.so")]

    @staticmethod
    def _folder(root: str) -> Path:
        return Path(root) / NATIVE

    @staticmethod
    def _compiler() -> str | None:
        wanted = os.environ.get("CXX", "").split()
        return next((path for name in (*wanted[:1], "g++", "clang++", "c++") if (path := shutil.which(name))), None)

    @staticmethod
    def _skip(why: str) -> None:
        print(f"warning: CPU kernels were not built, plain torch will be used: {why}", file=sys.stderr)


class PlatformDistribution(Distribution):
    """The wheel belongs to one platform, but to any Python: nothing in it is linked to the interpreter."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    ext_modules=[
        Extension("abyssal.backends.cpu.native._library", sources=[str(p) for p in sorted(NATIVE.glob("src/*.cpp"))])
    ],
    cmdclass={"build_ext": BuildNative},
    distclass=PlatformDistribution,
)
