"""Phases of a constrained answer, and what all answers under one grammar share."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .grammar import Backend
from .markup import SpelledMarker
from .mask import Mask, Rows, get_bit, mask_of, set_bit, set_one
from .spec import StructuredOutput
from .vocabulary import Vocabulary

OPENER = b"\n\n<"
"""What stands before the marker that opens tool calls."""


class Phase(enum.Enum):
    """Where a matcher is."""

    REASONING = "reasoning"
    TEXT = "text"
    GRAMMAR = "grammar"
    DONE = "done"


@dataclass(frozen=True, eq=False)
class Rules:
    """What all matchers of one grammar with the same stop ids share. Masks are int32 [words].

    Attributes:
        after_reasoning: the phase that `</think>` leads to.
        calls_allowed: text may be followed by tool calls.
        reasoning_may_stop: the request may end before `</think>`.
        reasoning_is_free: the mask of reasoning forbids nothing.
        may_empty: tokens that the grammar needs may be forbidden, so that none is left.
        reasoning, text, done: masks of the phases.
        marker: what no text may spell, for tool calls.
    """

    backend: Backend
    vocabulary: Vocabulary
    stop_ids: frozenset[int]
    after_reasoning: Phase
    calls_allowed: bool
    reasoning_may_stop: bool
    reasoning_is_free: bool
    may_empty: bool
    reasoning: Mask
    text: Mask
    done: Mask
    marker: SpelledMarker | None

    @classmethod
    def of(cls, spec: StructuredOutput, backend: Backend, stop_ids: frozenset[int], marker: SpelledMarker | None) -> Rules:
        """Rules of a specification; `stop_ids` are added to the EOS ids."""
        vocabulary = backend.vocabulary
        stops = stop_ids | vocabulary.eos_ids
        free = spec.kind == "tools" and spec.tool_choice in ("auto", "none")
        reasoning, text = vocabulary.known_mask.copy(), vocabulary.text_mask.copy()
        for token_id in stops:
            set_one(reasoning, token_id, free)
            set_one(text, token_id, True)
        return cls(
            backend=backend,
            vocabulary=vocabulary,
            stop_ids=stops,
            after_reasoning=Phase.TEXT if free else Phase.GRAMMAR,
            calls_allowed=spec.tool_choice == "auto",
            reasoning_may_stop=free,
            reasoning_is_free=free and len(vocabulary.known_ids) == vocabulary.size,
            may_empty=marker is not None or bool(stops & vocabulary.text_ids),
            reasoning=reasoning,
            text=text,
            done=mask_of(stops, vocabulary.size),
            marker=marker,
        )


def finish_rows(rules: Rules, masks: Mask, rows: Rows) -> None:
    """Allow all stop ids in the rows where the engine allows its EOS, and none in the others."""
    accepting = get_bit(masks, rows, rules.backend.eos_id)
    for token_id in rules.stop_ids:
        set_bit(masks, rows, token_id, accepting)
