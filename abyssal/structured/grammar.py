"""The seam between the matcher and a library that parses: what a backend has to offer.

A backend compiles a specification to an `EngineMatcher` in its first state. The engine knows one EOS id and nothing of
reasoning, of other stop ids or of text before tool calls: `matcher.Matcher` adds those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import AbyssalError
from .mask import Mask
from .spec import StructuredOutput
from .vocabulary import Vocabulary


class GrammarError(AbyssalError):
    """A matcher cannot go on: its request fails, others are unaffected."""


class EngineMatcher(ABC):
    """One sequence in one grammar, after reasoning and without stop ids."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, if the grammar does not allow it here."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""

    @abstractmethod
    def fork(self) -> EngineMatcher:
        """An independent copy in the same state."""

    @abstractmethod
    def fill(self, row: Mask) -> None:
        """Write the mask of the next token, int32 [words], in which the engine's EOS is allowed iff `is_accepting`."""

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, each of them the only one allowed; empty if there is a choice."""

    @property
    @abstractmethod
    def is_accepting(self) -> bool:
        """The text so far satisfies the grammar."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """No token can follow."""

    @property
    @abstractmethod
    def error(self) -> str | None:
        """Why it cannot go on (a limit of the library, or a state without a way out); None if it can."""


@dataclass(frozen=True)
class Segment:
    """Rows of one matcher to fill: `first_row` for its state, one more after each of the drafts that it accepts."""

    engine: EngineMatcher
    first_row: int
    drafts: Sequence[int]


class Backend(ABC):
    """A library that compiles grammars for one vocabulary. `compile` may be called from any thread.

    Attributes:
        num_copies: how often a grammar that many ask for is compiled at most, so that threads that fill masks have copies of
            their own.
    """

    vocabulary: Vocabulary
    num_copies: int = 1

    @property
    @abstractmethod
    def eos_id(self) -> int:
        """The EOS id that the engine's masks use."""

    @classmethod
    @abstractmethod
    def check(cls, spec: StructuredOutput, dsml_id: int | None) -> None:
        """Refuse at once what is known not to be enforced, without the vocabulary and without compiling.

        Args:
            dsml_id: the marker of tool calls, None if the tokenizer has none.

        Raises:
            InvalidRequest: as `compile`, which may still find more.
        """

    @abstractmethod
    def compile(self, spec: StructuredOutput) -> tuple[EngineMatcher, int]:
        """A matcher in its first state and the bytes it takes, roughly.

        Raises:
            InvalidRequest: naming the parameter and, for a schema, keyword and path.
        """

    def fill(self, segments: Sequence[Segment], masks: Mask) -> None:
        """Fill the rows of `masks` [rows, words] for all segments, leaving the matchers as they are."""
        for segment in segments:
            accepted = 0
            segment.engine.fill(masks[segment.first_row])
            for token_id in segment.drafts:
                if not segment.engine.accept(token_id):
                    break
                accepted += 1
                segment.engine.fill(masks[segment.first_row + accepted])
            segment.engine.rollback(accepted)
