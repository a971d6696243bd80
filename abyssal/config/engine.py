"""Settings of an engine. Few, frozen, checked; `resolve` turns every "auto" into a decision and logs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core.errors import ConfigError

ROUNDINGS = ("window", "compressed", "index", "activations")

BLOCK_TOKENS = 128
"""Tokens of one cache block, fixed by the model family."""

WeightMode = Literal["auto", "decoded", "packed"]
EngramMode = Literal["auto", "memory", "mmap"]
LoadFormat = Literal["safetensors", "dummy"]


@dataclass(frozen=True)
class Numerics:
    """Which roundings of the trained model are applied.

    Attributes:
        window: window KV rows to FP8.
        compressed: compressed KV rows to FP4.
        index: index queries and keys to FP4.
        activations: inputs of FP8 and FP4 linears to FP8.
    """

    window: bool = True
    compressed: bool = True
    index: bool = True
    activations: bool = True

    @classmethod
    def parse(cls, text: str) -> Numerics:
        """`released` (all four), `exact` (none), `cache` (all but activations), or names separated by commas.

        Raises:
            ConfigError: for any other word.
        """
        groups = {"released": ROUNDINGS, "exact": (), "cache": ROUNDINGS[:3]}
        names = groups.get(text, tuple(text.split(",")))
        for name in names:
            if name not in ROUNDINGS:
                raise ConfigError(f"numerics={text!r}: {name!r} is none of released, exact, cache, {', '.join(ROUNDINGS)}")
        return cls(**{name: name in names for name in ROUNDINGS})

    def __str__(self) -> str:
        return ",".join(name for name in ROUNDINGS if getattr(self, name)) or "exact"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model is run.

    Attributes:
        numerics: see `Numerics.parse`.
        weights: "decoded" to float32 once, "packed" as on disk and decoded per use, or "auto" by memory.
        engram: tables in "memory" or read by "mmap", row by row.
        load_format: "safetensors", or "dummy" for random weights from config alone.
        max_model_len: tokens of one sequence at most; None for the model's own limit, lowered to what the caches hold.
        max_num_seqs: sequences running at a time.
        max_num_batched_tokens: rows of one step.
        num_blocks: cache blocks of 128 tokens; None to fill `cache_bytes`.
        cache_bytes: memory for the block pool; None for a share of what is free.
        num_threads: processor threads; None for all that the process may use.
        backend: of the processor: "auto", "native" or "torch".
        device: where the model runs, "cpu" or "cuda"; sampling is done on the host in any case.
        seed: where requests without a seed get theirs from; None for the system's entropy.
        speculation: how many tokens are drafted and verified in a step: "off", a number up to the model's draft block, or
            "auto" for as many as pay, by measured costs and acceptance. Output does not depend on it.
        acceptance: which drafts are kept. "coupled" keeps those that the model would have drawn itself, so that output is
            the same as without drafts; "rejection" keeps a few more, and output is only distributed the same.
        bounded_replay: on how many rows of a prompt's end the decoder half of the layers runs. "exact": on as many as later
            steps can notice, which changes nothing; "off": on all; a number: on that many, which is an approximation.
        overlap: schedule each step while the one before it is computed. Output does not depend on it.
        invariant: each row's bits are independent of the batch around it, of chunks and of threads.
    """

    numerics: str = "released"
    weights: WeightMode = "auto"
    engram: EngramMode = "auto"
    load_format: LoadFormat = "safetensors"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    num_blocks: int | None = None
    cache_bytes: int | None = None
    num_threads: int | None = None
    backend: Literal["auto", "native", "torch"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int | None = None
    speculation: str | int = "off"
    acceptance: Literal["coupled", "rejection"] = "coupled"
    bounded_replay: str | int = "exact"
    overlap: bool = True
    invariant: bool = True

    def __post_init__(self) -> None:
        Numerics.parse(self.numerics)
        _choice("weights", self.weights, ("auto", "decoded", "packed"))
        _choice("engram", self.engram, ("auto", "memory", "mmap"))
        _choice("load_format", self.load_format, ("safetensors", "dummy"))
        _choice("backend", self.backend, ("auto", "native", "torch"))
        _choice("device", self.device, ("cpu", "cuda"))
        _choice("acceptance", self.acceptance, ("coupled", "rejection"))
        parse_speculation(self.speculation)
        parse_bounded_replay(self.bounded_replay)
        for name in ("overlap", "invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be True or False")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _positive(name, getattr(self, name))
        for name in ("max_model_len", "num_blocks", "cache_bytes", "num_threads"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))


def parse_speculation(value: str | int) -> Literal["off", "auto"] | int:
    """The setting `speculation`: "off", "auto", or a number of drafts, which may be given as text.

    Raises:
        ConfigError: for anything else.
    """
    if value == "off" or value == "auto":
        return "off" if value == "off" else "auto"
    if not _is_count(value):
        raise ConfigError(f"speculation={value!r}: must be off, auto, or a number of drafts of at least 1")
    return int(value)


def parse_bounded_replay(value: str | int) -> Literal["off", "exact"] | int:
    """The setting `bounded_replay`: "off", "exact", or a number of rows, which may be given as text.

    Raises:
        ConfigError: for anything else.
    """
    if value == "off" or value == "exact":
        return "off" if value == "off" else "exact"
    if not _is_count(value):
        raise ConfigError(f"bounded_replay={value!r}: must be exact, off, or a number of rows of at least 1")
    return int(value)


def _is_count(value: object) -> bool:
    """Whether a value is a number of at least 1, as such or as text."""
    if isinstance(value, str):
        return value.isascii() and value.isdigit() and int(value) >= 1
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: must be a whole number of at least 1")
