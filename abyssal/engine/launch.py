"""Assembles an engine's parts from a model folder: configuration, weights, model, caches, scheduler, text."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..backends.cpu.table import choose_backend, cpu_table
from ..cache.manager import CacheManager
from ..cache.spec import CacheSpec
from ..cache.storage import CacheStorage
from ..config.engine import EngineConfig, Numerics, parse_bounded_replay
from ..config.model import ModelConfig
from ..config.topology import Topology
from ..core.errors import ConfigError
from ..loading.calibration import read_temperatures
from ..loading.open import open_weights
from ..loading.resolve import resolve_model
from ..loading.weights import StoredWeights
from ..model.common import ModelContext
from ..model.dspark import DSpark
from ..model.flash import FlashModel
from ..ops.invariance import require_invariance
from ..ops.registry import OpTable
from ..plan.resolve import resolve
from ..runner.input_batch import BatchGeometry
from ..runner.logit_rules import TokenRoles
from ..runner.measure import StepLimits, limits_for
from ..runner.model_runner import ModelRunner
from ..runner.sampler import Sampler
from ..scheduler.scheduler import Scheduler
from ..text.chat import ChatTemplate
from ..text.tokenizer import TOKENIZER_FILE, Tokenizer, eos_token_ids
from ..text.vocabulary import token_map_of
from .device import CardDrafter, CardModel, CardWeights, resolve_for_card, zeros_on_card
from .drafts import DraftParts, check_speculation
from .preparation import token_roles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """Everything an engine drives. `config` has no "auto" left but that of `speculation`, which is decided in each step."""

    folder: Path
    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    chat: ChatTemplate | None
    token_roles: TokenRoles
    max_model_len: int
    op_table: OpTable
    cache: CacheManager
    storage: CacheStorage
    scheduler: Scheduler
    runner: ModelRunner
    drafts: DraftParts | None


def launch(
    model: str | Path,
    config: EngineConfig,
    *,
    revision: str | None = None,
    assume_yes: bool = True,
    shuffle_seed: int | None = None,
) -> EngineParts:
    """Find, check and load a model. Arguments as in `Engine`.

    Raises:
        AbyssalError: before anything large is read, if the model or the settings cannot work.
    """
    with_weights = config.load_format != "dummy"
    folder = resolve_model(model, revision=revision, assume_yes=assume_yes, with_weights=with_weights)
    model_config = ModelConfig.load(folder)
    topology = Topology.of(model_config.text)
    with_drafts = check_speculation(model_config.text, config)
    spec = CacheSpec.of(model_config.text, topology, with_drafts=with_drafts)
    on_card = config.device == "cuda"
    config = resolve_for_card(model_config, config, spec) if on_card else resolve(model_config, config)
    config = replace(config, backend=choose_backend(config.backend))
    if config.backend == "torch" and config.invariant and config.num_threads != 1:
        log.info("num_threads=1: torch adds up in another order with more; invariant=False takes all")
        config = replace(config, num_threads=1)
    num_blocks, num_threads = config.num_blocks, config.num_threads
    assert num_blocks is not None, "resolve() decides the number of blocks"
    assert num_threads is not None, "resolve() decides the number of threads"
    torch.set_num_threads(num_threads)
    op_table = _op_table(config, num_threads)
    if config.invariant:
        require_invariance(op_table, config.device if on_card else config.backend, config.device)
    tokenizer = _tokenizer(folder, model_config, config)
    cache = CacheManager(num_blocks, config.max_num_seqs, shuffle_seed=shuffle_seed)
    max_model_len = min(config.max_model_len or model_config.text.max_position_embeddings, cache.capacity_tokens)
    storage = CacheStorage(spec, num_blocks, config.max_num_seqs, zeros_on_card if on_card else None)
    replay_rows = _replay_rows(config, model_config, topology, spec)
    geometry = BatchGeometry.of(model_config.text, spec, topology, config.max_num_seqs, max_model_len, replay_rows)
    weights = open_weights(folder, model_config, config, CardWeights if on_card else StoredWeights)
    context = _model_context(model_config, config, op_table, weights)
    flash = _load_model(folder, context, topology, weights)
    scheduler = Scheduler(cache, config.max_num_seqs, config.max_num_batched_tokens)
    eos_ids = eos_token_ids(folder, model_config)
    sampler = Sampler(op_table, token_roles(model_config.text.vocab_size, eos_ids, tokenizer))
    runner = ModelRunner(CardModel(flash) if on_card else flash, storage, geometry, sampler)
    drafts = None
    if with_drafts:
        limits = limits_for(geometry, num_blocks, config.max_num_batched_tokens, model_config.text)
        drafts = _load_drafter(folder, context, flash, limits, config, sampler)
        drafts.install(config.speculation, scheduler, runner)
    return EngineParts(
        folder=folder,
        config=config,
        model_config=model_config,
        tokenizer=tokenizer,
        chat=ChatTemplate(tokenizer) if tokenizer is not None else None,
        token_roles=sampler.roles,
        max_model_len=max_model_len,
        op_table=op_table,
        cache=cache,
        storage=storage,
        scheduler=scheduler,
        runner=runner,
        drafts=drafts,
    )


def _op_table(config: EngineConfig, num_threads: int) -> OpTable:
    if config.device == "cuda":
        from ..backends.cuda.table import cuda_table

        return cuda_table(num_threads, invariant=config.invariant)
    assert config.backend != "auto", "choose_backend() decides it"
    return cpu_table(config.backend, num_threads, invariant=config.invariant)


def _replay_rows(config: EngineConfig, model_config: ModelConfig, topology: Topology, spec: CacheSpec) -> int | None:
    """Rows of a prompt's end on which the decoder half runs; None for all.

    Raises:
        ConfigError: if they would not fill the windows that the first steps after the prompt read.
    """
    wanted = parse_bounded_replay(config.bounded_replay)
    if wanted == "off":
        return None
    if wanted == "exact":
        return topology.replay_rows(model_config.text.sliding_window)
    least = spec.group("window_kv").rows[0]
    if wanted < least:
        raise ConfigError(f"bounded_replay={wanted}: must be at least {least} rows, a window and what drafts may take back")
    return wanted


def _tokenizer(folder: Path, model_config: ModelConfig, config: EngineConfig) -> Tokenizer | None:
    """The folder's tokenizer. A model made up from its configuration alone may go without."""
    if config.load_format == "dummy" and not (folder / TOKENIZER_FILE).is_file():
        log.warning("%s has no %s: prompts are token ids, and Engram hashes raw ids", folder, TOKENIZER_FILE)
        return None
    return Tokenizer.from_folder(folder, model_config)


def _model_context(
    model_config: ModelConfig, config: EngineConfig, op_table: OpTable, weights: StoredWeights
) -> ModelContext:
    held_as = config.weights
    assert held_as != "auto", "resolve() decides how weights are held"
    return ModelContext(model_config.text, Numerics.parse(config.numerics), op_table, held_as, weights, config.device)


def _load_model(folder: Path, context: ModelContext, topology: Topology, weights: StoredWeights) -> FlashModel:
    def on_layer(layer: int) -> None:
        log.info("layer %d of %d loaded", layer + 1, len(topology.layers))
        if context.held_as == "decoded":
            weights.release()

    token_map = torch.from_numpy(token_map_of(folder, context.config))
    return FlashModel(context, topology, token_map, on_layer)


def _load_drafter(
    folder: Path, context: ModelContext, flash: FlashModel, limits: StepLimits, config: EngineConfig, sampler: Sampler
) -> DraftParts:
    block_size = context.config.dspark_block_size
    temperatures = read_temperatures(folder, block_size, config.acceptance)
    if temperatures is None:
        log.info("no draft temperatures were fitted for this model (`abyssal calibrate`); confidences are taken as they are")
        temperatures = (1.0,) * block_size
    model = (CardDrafter if config.device == "cuda" else DSpark)(context, flash.embed, flash.head)
    log.info("%d draft stages loaded", context.config.num_nextn_predict_layers)
    return DraftParts(model, temperatures, limits, config.acceptance, sampler)
