"""Triton kernels compile for Hopper and Blackwell without a card, within the shared memory of one processor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED_BYTES = 227 << 10

# in a process of its own: the interpreter, which other tests switch on, replaces the compiler
SCRIPT = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from abyssal.backends.cuda.attention import BLOCK_KEYS, HEADS, attend_rows

constants = dict(NUM_HEADS=64, WIDTH=512, WINDOW=128, GROUP=HEADS, KEYS=BLOCK_KEYS, PRECISION="tf32x3")
indices = ("selected", "positions", "request", "query_start", "window_start", "slot")
names = attend_rows.arg_names

def kind(name):
    if name in constants:
        return "constexpr"
    if name.endswith("_ptr"):
        return "*i32" if name.removesuffix("_ptr") in indices else "*fp32"
    return "fp32" if name == "scale" else "i32"

source = ASTSource(
    attend_rows,
    {name: kind(name) for name in names},
    constexprs={(names.index(name),): value for name, value in constants.items()},
    attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")},
)
done = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 4, "num_stages": 1})
ptx = done.asm["ptx"]
print(json.dumps({"shared": done.metadata.shared, "matrix units": "mma" in ptx, "target": ptx.split(".target ")[1][:6]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_sparse_attention_compiles(capability, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["target"].startswith(f"sm_{capability}"[:6])
    assert found["matrix units"]
    assert found["shared"] <= SHARED_BYTES
