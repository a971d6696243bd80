"""What a step costs beside the model: a whole engine around a model that computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..backends.cpu.table import cpu_table
from ..cache.manager import CacheManager, num_blocks_for
from ..cache.spec import CacheSpec
from ..cache.storage import CacheStorage
from ..config.engine import EngineConfig
from ..config.released import released_config
from ..config.topology import Topology
from ..core.batch import ForwardBatch
from ..core.sampling_params import SamplingParams
from ..model.common import Caches
from ..runner.input_batch import BatchGeometry
from ..runner.logit_rules import TokenRoles
from ..runner.model_runner import ModelRunner
from ..runner.sampler import Sampler
from ..scheduler.scheduler import Scheduler
from .engine import Engine
from .launch import EngineParts

VOCAB_SIZE = 1024
PROMPT_TOKENS, WARMUP_STEPS = 100, 20


@dataclass(frozen=True)
class HostCost:
    """Microseconds of a decode step, by what they are spent on."""

    num_requests: int
    schedule_us: float
    prepare_us: float
    update_us: float

    @property
    def total_us(self) -> float:
        return self.schedule_us + self.prepare_us + self.update_us


class EmptyModel:
    """Gives every row the same logits."""

    def forward(self, batch: ForwardBatch, caches: Caches, features: list[torch.Tensor] | None = None) -> torch.Tensor:
        return torch.zeros(len(batch.logit_rows), VOCAB_SIZE)


def measure_host(num_requests: int, num_steps: int) -> HostCost:
    """Decode with that many requests, with the released model's caches and no model. Steps do not overlap."""
    engine = _engine(num_requests, PROMPT_TOKENS + WARMUP_STEPS + num_steps + 2)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
        for i in range(num_requests):
            engine.add([1 + (i + k) % 1000 for k in range(PROMPT_TOKENS)], params)
        while engine.stats.num_generation_tokens < WARMUP_STEPS * num_requests:
            engine.step()
        before = engine.stats
        for _ in range(num_steps):
            engine.step()
        after = engine.stats
    finally:
        engine.close()

    def micros(name: str) -> float:
        spent: float = getattr(after, name) - getattr(before, name)
        return spent / num_steps * 1e6

    return HostCost(num_requests, micros("schedule_seconds"), micros("prepare_seconds"), micros("update_seconds"))


def _engine(num_requests: int, max_model_len: int) -> Engine:
    model_config = released_config()
    topology = Topology.of(model_config.text)
    num_blocks = num_requests * num_blocks_for(max_model_len)
    config = EngineConfig(max_num_seqs=num_requests, num_blocks=num_blocks, num_threads=1, overlap=False, seed=0)
    spec = CacheSpec.of(model_config.text, topology)
    cache = CacheManager(num_blocks, num_requests)
    storage = CacheStorage(spec, num_blocks, num_requests)
    geometry = BatchGeometry.of(model_config.text, spec, topology, num_requests, max_model_len)
    op_table = cpu_table("auto", 1)
    sampler = Sampler(op_table, TokenRoles(VOCAB_SIZE))
    text = replace(model_config.text, vocab_size=VOCAB_SIZE)
    return Engine.of(
        EngineParts(
            folder=Path(),
            config=config,
            model_config=replace(model_config, text=text),
            tokenizer=None,
            chat=None,
            token_roles=sampler.roles,
            max_model_len=max_model_len,
            op_table=op_table,
            cache=cache,
            storage=storage,
            scheduler=Scheduler(cache, num_requests, max(512, num_requests)),
            runner=ModelRunner(EmptyModel(), storage, geometry, sampler),
            drafts=None,
        )
    )
