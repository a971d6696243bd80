"""Memory and processors as told by made-up system files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from abyssal.plan.machine import UNKNOWN_MEMORY, Machine, available_memory, available_processors

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path) -> tuple[Path, Path]:
    """A machine with 16 GiB available and no control group."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n")
    cgroup.mkdir()
    return proc, cgroup


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_available_not_free_memory(system: tuple[Path, Path]) -> None:
    assert available_memory(*system) == 16 * GIB


def test_group_limit_less_what_is_used_except_file_pages(system: tuple[Path, Path]) -> None:
    _, cgroup = system
    write(cgroup / "memory.max", f"{8 * GIB}\n")
    write(cgroup / "memory.current", f"{3 * GIB}\n")
    write(cgroup / "memory.stat", f"anon {2 * GIB}\nfile {GIB}\n")
    assert available_memory(*system) == 6 * GIB


def test_tightest_of_nested_groups(system: tuple[Path, Path]) -> None:
    proc, cgroup = system
    write(proc / "self" / "cgroup", "0::/outer/inner\n")
    write(cgroup / "outer" / "memory.max", f"{4 * GIB}\n")
    write(cgroup / "outer" / "inner" / "memory.max", "max\n")
    assert available_memory(*system) == 4 * GIB
    write(cgroup / "outer" / "inner" / "memory.max", f"{2 * GIB}\n")
    assert available_memory(*system) == 2 * GIB


def test_version_1_groups(system: tuple[Path, Path]) -> None:
    _, cgroup = system
    write(cgroup / "memory" / "memory.limit_in_bytes", str(0x7FFFFFFFFFFFF000))
    assert available_memory(*system) == 16 * GIB
    write(cgroup / "memory" / "memory.limit_in_bytes", str(5 * GIB))
    write(cgroup / "memory" / "memory.usage_in_bytes", str(GIB))
    assert available_memory(*system) == 4 * GIB


def test_a_full_group_has_nothing_and_a_silent_system_is_assumed(system: tuple[Path, Path], tmp_path: Path) -> None:
    _, cgroup = system
    write(cgroup / "memory.max", f"{GIB}\n")
    write(cgroup / "memory.current", f"{2 * GIB}\n")
    assert available_memory(*system) == 0
    assert available_memory(tmp_path / "none", tmp_path / "none") == UNKNOWN_MEMORY


def test_processors_within_the_quota(system: tuple[Path, Path]) -> None:
    _, cgroup = system
    allowed = available_processors(*system)
    assert allowed == len(os.sched_getaffinity(0))
    write(cgroup / "cpu.max", "max 100000\n")
    assert available_processors(*system) == allowed
    write(cgroup / "cpu.max", "50000 100000\n")
    assert available_processors(*system) == 1


def test_this_machine_has_something() -> None:
    machine = Machine.this()
    assert machine.memory_bytes > 0
    assert machine.num_processors >= 1
    assert machine.num_devices == 0
