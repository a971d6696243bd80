"""What an engine needs for drafting, put together from its settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ..config.engine import EngineConfig, parse_speculation
from ..config.model import TextConfig
from ..core.errors import ConfigError
from ..model.dspark import DSpark
from ..runner.drafting import Drafting
from ..runner.measure import MeasuredCosts, StepLimits, measure_costs
from ..runner.model_runner import ModelRunner
from ..runner.sampler import Sampler
from ..runner.simulate import SimulatedAcceptance
from ..runner.verify import AcceptanceRule, CoupledAcceptance, RejectionAcceptance
from ..scheduler.acceptance import Acceptance
from ..scheduler.auto_speculation import AutoSpeculation
from ..scheduler.costs import StepCosts
from ..scheduler.scheduler import Scheduler
from ..scheduler.speculation import FixedSpeculation, Speculation

log = logging.getLogger(__name__)


def check_speculation(text: TextConfig, config: EngineConfig) -> bool:
    """Whether a drafter is to be loaded.

    Raises:
        ConfigError: if the model has none, or drafts fewer tokens than are asked for.
    """
    setting = parse_speculation(config.speculation)
    if setting == "off":
        return False
    if not text.num_nextn_predict_layers:
        if setting == "auto":
            log.info("speculation=off: the model has no draft stages")
            return False
        raise ConfigError(f"speculation={setting}: the model has no draft stages; use off or auto")
    if setting != "auto" and setting > text.dspark_block_size:
        raise ConfigError(
            f"speculation={setting}: the model was trained to draft {text.dspark_block_size} tokens at a time, and drafts "
            f"beyond are worthless; use at most {text.dspark_block_size}, or auto"
        )
    return True


@dataclass
class DraftParts:
    """The drafter and what stays the same when `speculation` is changed.

    Attributes:
        temperatures: of the confidence head, by place.
    """

    model: DSpark
    temperatures: tuple[float, ...]
    limits: StepLimits
    acceptance: str
    sampler: Sampler
    _costs: MeasuredCosts | None = field(default=None, repr=False)

    def install(self, speculation: str | int, scheduler: Scheduler, runner: ModelRunner) -> None:
        """Have steps draft as the setting says. No request may be running."""
        setting = parse_speculation(speculation)
        if setting == "off":
            scheduler.speculation, runner.drafting = None, None
            return
        drafting = runner.drafting = Drafting(self.model, self._rule())
        scheduler.speculation = self._speculation(setting, runner)
        drafting.split = scheduler.speculation.split

    def _speculation(self, setting: str | int, runner: ModelRunner) -> Speculation:
        acceptance = Acceptance(self.temperatures)
        if isinstance(setting, int):
            return Speculation(FixedSpeculation(setting), acceptance)
        if self._costs is None:
            self._costs = measure_costs(runner, self.limits)
            log.info("measured seconds of a step by rows: %s; of drafting by requests: %s", *_shown(self._costs))
        costs = StepCosts(self._costs.forward, self._costs.drafting, self._costs.sampling)
        rule = AutoSpeculation(costs, acceptance, self.limits.context)
        return Speculation(rule, acceptance, costs)

    def simulate(self, share: float, runner: ModelRunner) -> None:
        """Keep each draft with this probability, if any is made."""
        if runner.drafting is not None:
            rule = SimulatedAcceptance(self.sampler, share)
            runner.drafting.rule, runner.drafting.oracle = rule, rule.confide

    def watch(self, scheduler: Scheduler) -> None:
        """Have the drafter take in all rows from now on."""
        scheduler.speculation = Speculation(FixedSpeculation(1), Acceptance(self.temperatures))

    def _rule(self) -> AcceptanceRule:
        return (CoupledAcceptance if self.acceptance == "coupled" else RejectionAcceptance)(self.sampler)


def _shown(costs: MeasuredCosts) -> tuple[str, str]:
    points = (costs.forward, costs.drafting)
    forward, drafting = (", ".join(f"{count}: {seconds:.4f}" for count, seconds in sorted(p)) for p in points)
    return forward, drafting
