"""What this process may use: memory and processors, within the limits of its control group."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
UNKNOWN_MEMORY = 8 << 30
"""Assumed where the system does not tell."""

NO_LIMIT = 1 << 60
"""Control groups of version 1 express "no limit" by a number near 2^63."""


@dataclass(frozen=True)
class Machine:
    """Where a model is to run.

    Attributes:
        memory_bytes: that may be filled; of each device if there are any, else of the host.
        num_processors: that may be used.
        num_devices: accelerators that share the model's experts and tables; 0 for the host's processors.
    """

    memory_bytes: int
    num_processors: int = 1
    num_devices: int = 0

    @classmethod
    def this(cls) -> Machine:
        """The machine that runs this process: memory that is free now, or can be freed by dropping file pages."""
        return cls(available_memory(), available_processors())


def available_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that this process can still fill: the least of what the system and its control groups allow."""
    limits = [_mem_available(proc / "meminfo"), *_cgroup_headroom(proc, cgroup)]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else UNKNOWN_MEMORY


def available_processors(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Processors that this process may run on, at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders(proc, cgroup):
        quota = (_read(folder / "cpu.max") or "max").split()
        if len(quota) == 2 and quota[0] != "max":
            count = min(count, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, count)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _mem_available(meminfo: Path) -> int | None:
    for line in (_read(meminfo) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _cgroup_folders(proc: Path, cgroup: Path) -> list[Path]:
    """Folders of the process's group and of all groups around it, version 2."""
    folders = [cgroup]
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        if line.startswith("0::/"):
            relative = Path(line[4:])
            folders += [cgroup / part for part in (relative, *relative.parents) if str(part) != "."]
    return folders


def _cgroup_headroom(proc: Path, cgroup: Path) -> list[int]:
    """What each limited group still has. File pages count as free, since the kernel drops them first."""
    found = []
    for folder in _cgroup_folders(proc, cgroup):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None:
            found.append(limit - (used or 0) + _file_pages(folder / "memory.stat", "file"))
    version1 = cgroup / "memory"
    limit, used = _number(version1 / "memory.limit_in_bytes"), _number(version1 / "memory.usage_in_bytes")
    if limit is not None and limit < NO_LIMIT:
        found.append(limit - (used or 0) + _file_pages(version1 / "memory.stat", "total_cache"))
    return found


def _file_pages(stat: Path, key: str) -> int:
    for line in (_read(stat) or "").splitlines():
        if line.startswith(f"{key} "):
            return int(line.split()[1])
    return 0
