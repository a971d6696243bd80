"""Every CUDA source compiles for its target, without a card."""

from __future__ import annotations

import re

import pytest

from abyssal.backends.cuda import build

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="no nvcc here")


def test_every_source_is_listed():
    assert {path.stem for path in build.SOURCES.glob("*.cu")} == set(build.LIBRARIES)


def test_listed_signatures_match_the_sources():
    kinds = {"int": "i", "float": "f", "int64_t": "l"}
    for name, functions in build.LIBRARIES.items():
        text = (build.SOURCES / f"{name}.cu").read_text()
        for function, signature in functions.items():
            found = re.search(rf'extern "C" int {function}\(([^)]*)\)', text)
            assert found, f"{name}.cu has no {function}"
            parameters = [p.strip() for p in found.group(1).split(",")]
            assert parameters.pop() == "cudaStream_t stream"
            got = "".join("p" if "*" in p else kinds[p.split()[0]] for p in parameters)
            assert got == signature, f"{name}.{function} takes {got}"


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("name", sorted(build.LIBRARIES))
def test_compiles_for_hopper(name, tmp_path):
    path = build.compile_library(name, "90a", tmp_path)
    assert path.stat().st_size > 10_000
    assert build.compile_library(name, "90a", tmp_path) == path


@needs_nvcc
def test_a_source_that_does_not_compile_is_reported(tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text("int f( {")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)broken\.cu.*error"):
        build.compile_library("broken", "90a", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
