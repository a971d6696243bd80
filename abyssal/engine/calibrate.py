"""Fits the temperatures of the drafter's confidence head on text that the model generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from ..core.errors import AbyssalError
from ..core.sampling_params import SamplingParams
from ..loading.calibration import CALIBRATION_FILE, write_temperatures
from ..scheduler.calibration import Calibration, JudgedDraft, fit_temperatures
from .engine import Engine

FEWEST_DRAFTS = 100
"""Below this many verified tokens of the first place a fit is noise."""


def collect_drafts(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    advance: Callable[[int], None] = lambda count: None,
) -> list[JudgedDraft]:
    """Generate from each prompt, whole blocks being verified, and note what became of every draft.

    Args:
        advance: told how many requests ended in each step.

    Raises:
        AbyssalError: if a request is refused or fails.
    """
    drafts: list[JudgedDraft] = []

    def record(logits: tuple[float, ...], num_verified: int, num_accepted: int) -> None:
        if num_verified:
            drafts.append(JudgedDraft(logits[:num_verified], num_accepted))

    engine.set_speculation(engine.model_config.text.dspark_block_size)
    engine.record_drafts(record)
    for prompt in prompts:
        engine.add(prompt, params)
    while engine.has_unfinished:
        finished = [output for output in engine.step() if output.finished]
        for output in finished:
            if output.error is not None:
                raise AbyssalError(f"request {output.request_id} failed: {output.error}")
        advance(len(finished))
    engine.record_drafts(None)
    return drafts


def default_path(engine: Engine) -> Path:
    """Where an engine looks for the temperatures of its model."""
    return engine.folder / CALIBRATION_FILE


def calibrate(engine: Engine, drafts: Sequence[JudgedDraft], path: Path) -> Calibration:
    """Fit, and store for the engine's kind of acceptance.

    Raises:
        AbyssalError: if there are too few drafts, or the file cannot be written.
    """
    if len(drafts) < FEWEST_DRAFTS:
        raise AbyssalError(
            f"{len(drafts)} drafts were verified, and at least {FEWEST_DRAFTS} are needed; give more prompts or a larger "
            "output length"
        )
    fitted = fit_temperatures(drafts, engine.model_config.text.dspark_block_size)
    figures = {name: list(values) for name, values in asdict(fitted).items() if name != "temperatures"}
    write_temperatures(path, fitted.temperatures, engine.config.acceptance, figures)
    return fitted
