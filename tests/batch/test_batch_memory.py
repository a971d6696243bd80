"""Memory does not grow with the input, but for the ids that have to be told apart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("order", ["free", "ordered"])
def test_a_hundred_thousand_lines(order: str, tmp_path: Path) -> None:
    """30 MB in and 50 MB out. The table of ids takes 4 MiB, and 2 MiB more while it grows."""
    num_lines = 100_000 if order == "free" else 10_000
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    command = [sys.executable, str(HERE / "memory_run.py"), str(tmp_path), str(num_lines), order]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 12 * 2**20
