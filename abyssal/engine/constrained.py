"""ConstrainedRequests: requests whose grammar is being compiled. They wait here, outside of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from ..core.errors import AbyssalError, InvalidRequest
from ..core.request import FinishReason, Request
from ..runner.logit_rules import TokenRoles
from ..structured.compiler import CompiledGrammar, GrammarCompiler
from ..structured.spec import StructuredOutput
from ..structured.vocabulary import Vocabulary
from ..text.tokenizer import Tokenizer

WAIT_SECONDS = 0.1
"""How long a step waits for a grammar when there is nothing else to do."""


@dataclass(frozen=True)
class _Waiting:
    requests: Sequence[Request]
    future: Future[CompiledGrammar]


class ConstrainedRequests:
    """Requests on their way to a matcher, by the id of their group. Not thread-safe.

    Attributes:
        compiler: made when the first constraint is checked; None before.
    """

    def __init__(self, tokenizer: Tokenizer | None, roles: TokenRoles) -> None:
        self._tokenizer, self._roles = tokenizer, roles
        self._waiting: dict[str, _Waiting] = {}
        self.compiler: GrammarCompiler | None = None

    def __len__(self) -> int:
        return sum(len(waiting.requests) for waiting in self._waiting.values())

    def check(self, spec: StructuredOutput) -> None:
        """Refuse what would not be enforced.

        Raises:
            InvalidRequest: naming the parameter, for a schema with keyword and path.
        """
        if not isinstance(spec, StructuredOutput):
            raise InvalidRequest("structured", spec, "must be a StructuredOutput")
        self._compiler().check(spec)

    def add(self, group_id: str, spec: StructuredOutput, requests: Sequence[Request]) -> None:
        """Compile, and let requests wait for it. A grammar that fails fails its own requests only."""
        try:
            future = self._compiler().submit(spec)
        except AbyssalError as error:  # too many grammars that take too long
            future = Future()
            future.set_exception(error)
        self._waiting[group_id] = _Waiting(requests, future)

    def abort(self, group_id: str) -> None:
        """End requests that wait. What is being compiled for them goes on, perhaps for others."""
        waiting = self._waiting.pop(group_id, None)
        for request in waiting.requests if waiting is not None else ():
            request.finish(FinishReason.ABORT)

    def take(self, *, may_wait: bool) -> list[tuple[str, Sequence[Request]]]:
        """Requests that wait no longer: they have their constraint, or are finished with the reason why they have none.

        Args:
            may_wait: stay here for a moment if none is ready.
        """
        if may_wait and self._waiting:
            wait([w.future for w in self._waiting.values()], timeout=WAIT_SECONDS, return_when=FIRST_COMPLETED)
        ready = [group_id for group_id, waiting in self._waiting.items() if waiting.future.done()]
        return [(group_id, self._settle(self._waiting.pop(group_id))) for group_id in ready]

    def close(self) -> None:
        """Let the threads that compile end."""
        if self.compiler is not None:
            self.compiler.close()
            self.compiler = None

    def _settle(self, waiting: _Waiting) -> Sequence[Request]:
        error = waiting.future.exception()
        for request in waiting.requests:
            if error is not None:
                request.finish(FinishReason.ERROR, error=str(error) or type(error).__name__)
            else:
                request.constraint = waiting.future.result().matcher(request.params.stop_token_ids)
        return waiting.requests

    def _compiler(self) -> GrammarCompiler:
        if self._tokenizer is None:
            raise InvalidRequest("structured", "<a constraint>", "needs a tokenizer, and this model folder has none")
        if self.compiler is None:
            self.compiler = GrammarCompiler(Vocabulary.of(self._tokenizer, self._roles.vocab_size, self._roles.eos))
        return self.compiler
