"""A model on a card behind the interfaces of one on the host: batches go there, logits come back.

The runner, its inputs and the sampler stay on the host. Weights are taken over once; caches lie on the card for good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..backends.cuda.on_card import to_card
from ..cache.spec import CacheSpec
from ..config.engine import EngineConfig
from ..config.model import ModelConfig
from ..core.batch import DraftBatch, ForwardBatch
from ..core.errors import UnsupportedOnBackend
from ..loading.weights import StoredEngramTable, StoredWeights
from ..model.common import Caches
from ..model.dspark import DraftBlock, DraftChain, DSpark
from ..model.flash import FlashModel
from ..plan.machine import Machine, available_processors
from ..plan.resolve import resolve
from ..quant.formats import StoredMatrix

_LOOKED_UP = ("embed", ".markov_head.embed")
"""Matrices that are read row by row, by ids on the card."""


def resolve_for_card(model: ModelConfig, config: EngineConfig, spec: CacheSpec) -> EngineConfig:
    """`plan.resolve.resolve` for the memory that the current card has free.

    Raises:
        UnsupportedOnBackend: there is no card.
        CapacityExceeded, ConfigError: as `resolve`.
    """
    if not torch.cuda.is_available():
        raise UnsupportedOnBackend("device='cuda': torch sees no NVIDIA card here; device='cpu' runs on the processor")
    free = torch.cuda.mem_get_info()[0]
    asked = replace(config, engram="mmap" if config.engram == "auto" else config.engram)
    resolved = resolve(model, asked, Machine(free, available_processors(), 1))
    weights = "packed" if config.weights == "auto" else config.weights
    num_blocks = resolved.num_blocks
    assert num_blocks is not None, "resolve() decides the number of blocks"
    if config.num_blocks is None:
        # planned for packed rows; they are held as float32
        more = config.max_num_seqs * (spec.slot_bytes(packed=False) - spec.slot_bytes(packed=True))
        pool = max(0, num_blocks * spec.block_bytes(packed=True) - more)
        num_blocks = max(1, pool // spec.block_bytes(packed=False))
    return replace(resolved, weights=weights, num_blocks=num_blocks)


def zeros_on_card(*shape: int) -> torch.Tensor:
    """Memory of a cache group."""
    return torch.zeros(shape, device="cuda")


class CardWeights(StoredWeights):
    """Parameters for a model on the card. Matrices stay where they are until a backend packs them."""

    def matrix(self, name: str) -> StoredMatrix:
        matrix = super().matrix(name)
        return to_card(matrix) if name == _LOOKED_UP[0] or name.endswith(_LOOKED_UP[1]) else matrix

    def dense(self, name: str) -> torch.Tensor:
        return super().dense(name).to("cuda")

    def engram_table(self, name: str) -> CardTable:  # type: ignore[override]
        return CardTable(super().engram_table(name))


@dataclass(frozen=True)
class CardTable:
    """An Engram table in the host's memory or on disk, its rows wanted on the card."""

    stored: StoredEngramTable

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return self.stored.gather(rows.cpu()).to("cuda")


class CardModel:
    """`FlashModel` for a runner on the host."""

    def __init__(self, model: FlashModel) -> None:
        self._model = model

    def forward(self, batch: ForwardBatch, caches: Caches, features: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Logits float32 [M, V] on the host; `features` stay on the card."""
        return self._model.forward(to_card(batch), caches, features).cpu()


class CardDrafter(DSpark):
    """`DSpark` for a runner on the host: tokens and logits pass there, blocks and features stay on the card."""

    def observe(self, features: torch.Tensor, batch: ForwardBatch, caches: Caches) -> None:
        super().observe(features, to_card(batch), caches)

    def propose(self, batch: DraftBatch, caches: Caches) -> DraftBlock:
        return super().propose(to_card(batch), caches)

    def chain(
        self, block: DraftBlock, anchor_ids: torch.Tensor, length: int, choose: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> DraftChain:
        chain = super().chain(block, anchor_ids.to("cuda"), length, lambda k, logits: choose(k, logits.cpu()).to("cuda"))
        return DraftChain(chain.token_ids.cpu(), chain.logits.cpu(), chain.confidence.cpu())
