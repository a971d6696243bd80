"""Where tensors come from: the interface that a checkpoint on disk and a random one share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor.

    Attributes:
        dtype: as safetensors names it.
        shard: file name; empty for a random checkpoint.
        offset: of its first byte in the file.
        num_bytes: in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    num_bytes: int


class RowReader(Protocol):
    """Rows of one byte tensor [R, W], of which a caller wants a few."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by index: int64 [M] to uint8 [M, W]. Reads nothing else."""
        ...

    def in_memory(self) -> RowReader:
        """The same rows with all of them held in memory."""
        ...


class TensorSource(Protocol):
    """Tensors by checkpoint name, without a `model.` prefix."""

    def names(self) -> Iterable[str]: ...

    def __contains__(self, name: object) -> bool: ...

    def spec(self, name: str) -> TensorEntry:
        """What is stored under a name; KeyError if nothing."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype; FP8, E8M0 and I8 as uint8.

        It may be a read-only map of a file: never write to it.
        """
        ...

    def rows(self, name: str) -> RowReader:
        """Rows of a byte tensor, one by one."""
        ...

    def release(self) -> None:
        """Let go of pages that were read; what was handed out stays valid and is read again when used."""
        ...


@dataclass(frozen=True)
class TensorRows:
    """Rows of a tensor in memory."""

    data: torch.Tensor

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return self.data.index_select(0, rows)

    def in_memory(self) -> TensorRows:
        return self
