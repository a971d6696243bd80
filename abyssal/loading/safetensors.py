"""A checkpoint folder: safetensors shards and their index, memory-mapped and never copied as a whole.

Only safetensors files are opened. A shard is a plain file name inside the folder (which may be a link, as in the hub's
cache); whatever names another place is refused.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config.model import ModelConfig
from ..core.errors import CheckpointError
from .header import read_header
from .names import INDEX_FILE, SINGLE_FILE, TensorSpec, expected_tensors
from .source import TensorEntry, TensorRows

PREFIX = "model."
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

_TORCH_DTYPES = {
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


@dataclass(frozen=True, eq=False)
class MappedRows:
    """Rows of a byte tensor in a file."""

    data: torch.Tensor
    descriptor: int
    offset: int

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by index: int64 [M] to uint8 [M, W].

        The pages are asked for before any is read, so that the disk serves them side by side and not one by one.
        """
        width, page = self.data.shape[1], mmap.PAGESIZE
        first = rows * width + self.offset
        pages = torch.cat((first // page, (first + (width - 1)) // page))
        for number in set(pages.tolist()) if hasattr(os, "posix_fadvise") else ():
            os.posix_fadvise(self.descriptor, number * page, page, os.POSIX_FADV_WILLNEED)
        return self.data.index_select(0, rows)

    def in_memory(self) -> TensorRows:
        return TensorRows(self.data.clone())


class Checkpoint:
    """The tensors of one folder. Implements `TensorSource`."""

    def __init__(self, folder: Path, entries: dict[str, TensorEntry], stored_names: Mapping[str, str]) -> None:
        """See `open`. `stored_names` maps names without prefix to those in the files."""
        self.folder = folder
        self._entries = entries
        self._stored_names = stored_names
        self._maps: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read the index and all headers, no data.

        Raises:
            CheckpointError: listing all shards that are missing, truncated, malformed or outside the folder, and where the
                index and the shards disagree.
        """
        folder = Path(folder)
        if (folder / INDEX_FILE).is_file():
            stored = _read_shards(folder, _read_index(folder / INDEX_FILE))
        elif (folder / SINGLE_FILE).is_file():
            stored = read_header(folder / SINGLE_FILE)
        else:
            raise CheckpointError(_nothing_to_open(folder))
        entries: dict[str, TensorEntry] = {}
        names: dict[str, str] = {}
        for stored_name, entry in stored.items():
            name = stored_name.removeprefix(PREFIX)
            if name in entries:
                raise CheckpointError(f"{folder}: holds both {name!r} and {PREFIX + name!r}")
            entries[name], names[name] = entry, stored_name
        return cls(folder, entries, names)

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def spec(self, name: str) -> TensorEntry:
        return self._entries[name]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def check(self, config: ModelConfig) -> None:
        """Compare with what the configuration demands.

        Raises:
            CheckpointError: one error that lists every tensor that is missing, unexpected, or of another shape or dtype.
        """
        expected = expected_tensors(config)
        problems = [*self._missing(expected), *self._unlike(expected)]
        problems += [f"{self._stored_names[name]}: unexpected" for name in self._entries if name not in expected]
        if problems:
            count = len(problems)
            raise CheckpointError(
                f"{self.folder}: {count} tensor{'s do' if count > 1 else ' does'} not fit config.json", problems
            )

    def _missing(self, expected: Mapping[str, TensorSpec]) -> Iterable[str]:
        for name in expected.keys() - self._entries.keys():
            weight = name.removesuffix(".scale") + ".weight"
            is_scale = name.endswith(".scale") and weight in self._entries
            yield f"{name}: missing, the scale of {weight}" if is_scale else f"{name}: missing"

    def _unlike(self, expected: Mapping[str, TensorSpec]) -> Iterable[str]:
        for name, entry in self._entries.items():
            want = expected.get(name)
            if want is not None and entry.dtype not in want.dtypes:
                yield f"{name}: dtype {entry.dtype}, expected {' or '.join(want.dtypes)}"
            if want is not None and entry.shape != want.shape:
                yield f"{name}: shape {list(entry.shape)}, expected {list(want.shape)}"

    def tensor(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        if entry.dtype not in _TORCH_DTYPES:
            raise CheckpointError(f"{name}: dtype {entry.dtype} cannot be read; supported are {', '.join(_TORCH_DTYPES)}")
        dtype = _TORCH_DTYPES[entry.dtype]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        data = _view_bytes(self._map(entry.shard), entry.offset, entry.num_bytes)
        if entry.offset % dtype.itemsize:
            data = data.clone()  # an element may not straddle its natural boundary
        return data.view(dtype).view(entry.shape)

    def rows(self, name: str) -> MappedRows:
        entry = self._entries[name]
        start = entry.offset // mmap.PAGESIZE * mmap.PAGESIZE
        # read-ahead would fetch a hundred rows for each that is wanted
        self._map(entry.shard).madvise(mmap.MADV_RANDOM, start, entry.offset + entry.num_bytes - start)
        descriptor = os.open(self.folder / entry.shard, os.O_RDONLY)
        reader = MappedRows(self.tensor(name), descriptor, entry.offset)
        weakref.finalize(reader, os.close, descriptor)
        return reader

    def release(self) -> None:
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, shard: str) -> mmap.mmap:
        if shard not in self._maps:
            with (self.folder / shard).open("rb") as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[shard]


def _view_bytes(buffer: mmap.mmap, offset: int, count: int) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch warns that writing to a read-only map is undefined. Nobody writes to stored tensors.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=offset)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to shard file name."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path}: its weight_map does not map tensor names to file names")
    return weight_map


def _read_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, TensorEntry]:
    stored: dict[str, TensorEntry] = {}
    problems = []
    for shard in sorted(set(weight_map.values())):
        refusal = _shard_refusal(folder, shard)
        if refusal is not None:
            problems.append(refusal)
            continue
        try:
            header = read_header(folder / shard)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems += [f"{shard}: {name!r} is in the index but not in the file" for name in _absent(weight_map, shard, header)]
        problems += [
            f"{shard}: {name!r} is in the file but not in the index" for name in header if weight_map.get(name) != shard
        ]
        stored.update(header)
    if problems:
        raise CheckpointError(f"{folder}: the shards cannot be used", problems)
    return stored


def _absent(weight_map: Mapping[str, str], shard: str, header: Mapping[str, TensorEntry]) -> Iterable[str]:
    return (name for name, file in weight_map.items() if file == shard and name not in header)


def _shard_refusal(folder: Path, shard: str) -> str | None:
    """Why a file that the index names is not opened, or None."""
    if Path(shard).name != shard or "\\" in shard or "\0" in shard:
        return f"{shard!r}: leads outside the folder, so it is refused"
    if shard.endswith(PICKLE_SUFFIXES):
        return f"{shard}: is a pickle, which may run code when opened; only safetensors files are read"
    if not shard.endswith(".safetensors"):
        return f"{shard}: is not a safetensors file"
    if not (folder / shard).is_file():
        return f"{shard}: missing. Download it again"
    return None


def _nothing_to_open(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder}: holds {', '.join(pickles[:3])} but no safetensors. A pickle may run code when opened, so none is "
            "read; convert the weights to safetensors"
        )
    return f"{folder}: has neither {INDEX_FILE} nor {SINGLE_FILE}"
