"""A scheduler with a fake runner, and short ways to make requests and to take steps."""

import importlib.util
import itertools
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from abyssal.cache.manager import CacheManager
from abyssal.core.batch import RunnerOutput, SchedulerOutput
from abyssal.core.request import Request
from abyssal.core.sampling_params import SamplingParams
from abyssal.scheduler.scheduler import Scheduler
from abyssal.scheduler.speculation import Speculation


def _load(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fakes = _load("fake_runner")


@dataclass
class Loop:
    """Scheduler and fake runner; `depth` steps are scheduled and run before the results of the first are taken."""

    num_blocks: int = 8
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    depth: int = 1
    shuffle_seed: int | None = None
    speculation: Speculation | None = None
    pending: deque[tuple[SchedulerOutput, RunnerOutput]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.cache = CacheManager(self.num_blocks, self.max_num_seqs, shuffle_seed=self.shuffle_seed)
        self.scheduler = Scheduler(self.cache, self.max_num_seqs, self.max_num_batched_tokens, self.speculation)
        self.runner = fakes.FakeRunner(self.num_blocks, self.max_num_seqs)

    def step(self) -> SchedulerOutput:
        """Schedule and run a step; take results until fewer than `depth` steps are out."""
        scheduled = self.scheduler.schedule()
        self.pending.append((scheduled, self.runner.run(scheduled)))
        while len(self.pending) >= self.depth:
            self.update()
        return scheduled

    def update(self) -> list[Request]:
        """Take the results of the oldest step that is out."""
        return self.scheduler.update(*self.pending.popleft())

    def steps_until(self, condition: Any, limit: int = 2000) -> None:
        """Step until `condition()` holds."""
        for _ in range(limit):
            if condition():
                return
            self.step()
            self.scheduler.check_integrity()
        raise AssertionError(f"no end after {limit} steps")

    def drain(self) -> None:
        """Step until every request has ended and every result is in."""
        self.steps_until(lambda: not self.scheduler.has_unfinished)
        while self.pending:
            self.update()


@pytest.fixture
def make_loop() -> type[Loop]:
    return Loop


@pytest.fixture
def make_request() -> Any:
    """`make_request(prompt_len, max_tokens, ...)`; ids count up from r0, further keywords are sampling parameters."""
    ids = itertools.count()

    def make(prompt_len: int, max_tokens: int | None = 1, *, request_id: str | None = None, **kwargs: Any) -> Request:
        own = {
            name: kwargs.pop(name)
            for name in ("max_total_tokens", "eos_token_ids", "row_schedule", "wants_prompt_logits")
            if name in kwargs
        }
        number = next(ids)
        return Request(
            request_id=request_id or f"r{number}",
            prompt_token_ids=[(7 * i + number) % 50 for i in range(prompt_len)],
            params=SamplingParams(max_tokens=max_tokens, **kwargs),
            seed=1000 + number,
            **({"max_total_tokens": 1_000_000} | own),
        )

    return make


@pytest.fixture
def expected_output() -> Any:
    """`expected_output(request, n)`: the first n tokens that the fake runner draws for it when it runs alone."""

    def expected(request: Request, num_tokens: int) -> list[int]:
        return fakes.continuation(request.prompt_token_ids, request.seed, 50, num_tokens)

    return expected
