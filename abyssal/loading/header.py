"""The header of one safetensors file, read and checked without trusting any of it.

A file is the header's length (uint64, little-endian), the header (JSON: name to dtype, shape and byte range), and the data.
Ranges must tile the data from its first to its last byte, so that a truncated file is noticed before anything is read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from .names import DTYPE_BYTES
from .source import TensorEntry

MAX_HEADER_BYTES = 256 << 20
LENGTH_BYTES = 8


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensors of a file by name.

    Raises:
        CheckpointError: if the file is not safetensors, is truncated, or its ranges do not fit.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or LENGTH_BYTES + length > size or length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: not a safetensors file, or truncated ({size} bytes, header of {length})")
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_object_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is malformed: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    data_start = LENGTH_BYTES + length
    entries = {name: _entry(path, name, value, data_start) for name, value in header.items()}
    _check_tiling(path, entries, data_start, size)
    return entries


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]} if all(
            map(_is_count, (*shape, start, stop))
        ):
            num_bytes = stop - start
        case _:
            raise CheckpointError(f"{path}: the header's entry for {name!r} is malformed")
    if num_bytes < 0 or (dtype in DTYPE_BYTES and num_bytes != math.prod(shape) * DTYPE_BYTES[dtype]):
        raise CheckpointError(f"{path}: {name!r} is {dtype} {shape} but has {num_bytes} bytes")
    return TensorEntry(dtype, tuple(shape), path.name, data_start + start, num_bytes)


def _check_tiling(path: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != end:
            raise CheckpointError(f"{path}: {name!r} begins at byte {entry.offset}, but what is before it ends at {end}")
        end += entry.num_bytes
    if end > size:
        raise CheckpointError(f"{path}: truncated, has {size} bytes of {end}. Download this file again")
    if end < size:
        raise CheckpointError(f"{path}: has {size - end} bytes more than its header describes")
