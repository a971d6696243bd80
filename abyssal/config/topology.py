"""Layer roles, computed once from the configuration: who owns compressed KV, who selects entries, who reads whom.

A layer with ratio r > 0 attends, beside its own window, to compressed entries of one source layer, each standing for r
tokens. A source layer projects them (`owns_compressed`). Which entries a query reads is selected at an index-source layer
(`selects`) and reused by the layers after it; at and after the candidate source, selection is confined to candidate blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import ConfigError
from .model import TextConfig


@dataclass(frozen=True)
class LayerPlan:
    """The role of one layer.

    Attributes:
        ratio: tokens for each compressed entry; 0 means window attention only.
        kv_source: layer whose compressed entries are read, None if `ratio` is 0.
        index_source: layer whose selection is used, None if `ratio` is 0.
        is_candidate_source: publishes candidate blocks.
        uses_candidates: selects inside the candidate blocks only.
        engram_index: position in the list of Engram layers, or None.
    """

    layer_id: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_candidate_source: bool
    uses_candidates: bool
    engram_index: int | None

    @property
    def owns_compressed(self) -> bool:
        return self.kv_source == self.layer_id

    @property
    def selects(self) -> bool:
        return self.index_source == self.layer_id

    @property
    def owns_partial_group(self) -> bool:
        """Whether an incomplete group leaves state behind."""
        return self.owns_compressed and self.ratio > 1


@dataclass(frozen=True)
class Topology:
    """The roles of all layers of a model."""

    layers: tuple[LayerPlan, ...]

    @property
    def compressed_sources(self) -> tuple[LayerPlan, ...]:
        return tuple(p for p in self.layers if p.owns_compressed)

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder half: the last that owns compressed entries. All after it read those, and windows."""
        return self.compressed_sources[-1].layer_id

    def replay_rows(self, window: int) -> int:
        """Rows of a prompt's end on which the decoder half has to run, so that all that later steps can see of it is exact.

        A layer's row needs window - 1 earlier rows of the layer before; over D layers the last row needs D (window - 1).
        """
        return (len(self.layers) - self.decoder_start) * (window - 1) + 1

    @property
    def ratios(self) -> tuple[int, ...]:
        """Distinct non-zero ratios, ascending."""
        return tuple(sorted({p.ratio for p in self.layers if p.ratio}))

    @classmethod
    def of(cls, config: TextConfig) -> Topology:
        """Derive the roles.

        Raises:
            ConfigError: where the lists contradict each other.
        """
        plans = []
        for layer in range(config.num_hidden_layers):
            ratio = config.compress_ratios[layer]
            kv_source = _source(layer, config.kv_source_layer_ids, "kv_source_layer_ids") if ratio else None
            index_source = _source(layer, config.index_source_layer_ids, "index_source_layer_ids") if ratio else None
            if kv_source is not None and config.compress_ratios[kv_source] != ratio:
                raise ConfigError(
                    f"layer {layer} has compress ratio {ratio} but reads layer {kv_source}, "
                    f"whose ratio is {config.compress_ratios[kv_source]}"
                )
            if kv_source is not None and index_source is not None and index_source < kv_source:
                raise ConfigError(
                    f"layer {layer} reads KV of layer {kv_source} by the older selection of layer {index_source}"
                )
            plans.append(
                LayerPlan(
                    layer_id=layer,
                    ratio=ratio,
                    kv_source=kv_source,
                    index_source=index_source,
                    is_candidate_source=layer == config.candidate_source_layer_id,
                    uses_candidates=layer > config.candidate_source_layer_id and index_source == layer,
                    engram_index=config.engram_layer_ids.index(layer) if layer in config.engram_layer_ids else None,
                )
            )
        candidate = plans[config.candidate_source_layer_id]
        if not candidate.selects:
            raise ConfigError(f"candidate_source_layer_id={candidate.layer_id} is not an index source layer")
        for plan in plans:
            if plan.uses_candidates and plan.kv_source != candidate.kv_source:
                raise ConfigError(f"layer {plan.layer_id} selects in candidate blocks of another KV source")
        return cls(tuple(plans))


def _source(layer: int, sources: tuple[int, ...], name: str) -> int:
    """The greatest source at or before a layer."""
    earlier = [s for s in sources if s <= layer]
    if not earlier:
        raise ConfigError(f"layer {layer} is compressed but no entry of {name} is at or before it")
    return max(earlier)
