"""Sizes as people read them."""

from __future__ import annotations


def readable(size: float) -> str:
    """Bytes in decimal units with three digits or so: 890 B, 19.2 kB, 510 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
