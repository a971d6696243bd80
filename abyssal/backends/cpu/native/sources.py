"""Which sources a native library was built from, so that a stale one is never called. setup.py loads this by its path."""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCES = Path(__file__).parent / "src"


def digest() -> str:
    """A hash of the names and contents of all sources, 16 hexadecimal digits."""
    state = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]*")):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]
