"""Admission: from what a user asks for to the sequences of a request, checked, each with its seed and its sink."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence

from ..core.errors import InvalidRequest
from ..core.request import Request, RowSchedule
from ..core.sampling_params import SamplingParams
from ..runner.logit_rules import TokenRoles
from ..text.detokenizer import IncrementalDetokenizer
from ..text.tokenizer import Tokenizer
from .group import SampleGroup, params_of
from .preparation import prompt_ids, resolve_params, seed_of
from .tracker import RequestTracker, TextSink


class Admission:
    """Makes sequences of requests that can be run.

    Args:
        max_model_len: tokens of one sequence at most.
        seed: fixes the seeds of requests that bring none; None for random ones.
    """

    def __init__(self, tokenizer: Tokenizer | None, roles: TokenRoles, max_model_len: int, seed: int | None) -> None:
        self._tokenizer, self._roles, self._max_model_len = tokenizer, roles, max_model_len
        self._seeds = random.Random(seed) if seed is not None else None

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Parameters with everything spelled in token ids; raises `InvalidRequest` for what cannot be."""
        return resolve_params(params, self._roles, self._tokenizer)

    def fill(
        self,
        group: SampleGroup,
        prompt: str | Sequence[int],
        params: SamplingParams,
        sink: TextSink | Sequence[TextSink] | None,
        *,
        row_schedule: RowSchedule,
        wants_prompt_logits: bool,
    ) -> None:
        """Make the sequences of a group, one for each of `params.n` outputs. Arguments as in `Engine.add`.

        Args:
            params: resolved ones.

        Raises:
            InvalidRequest: for a prompt that cannot be run, or sinks that do not go with the outputs.
        """
        token_ids = prompt_ids(prompt, self._tokenizer, self._roles.vocab_size)
        limit = self._max_model_len + 1 if wants_prompt_logits else self._max_model_len
        if len(token_ids) >= limit:
            raise InvalidRequest(
                "prompt",
                f"<{len(token_ids)} tokens>",
                f"must be shorter than max_model_len={limit} tokens to leave room for one more",
            )
        sinks = self._sinks(params, sink)
        seed, text = self._seed(params), prompt if isinstance(prompt, str) else None
        for index, own_sink in enumerate(sinks):
            sequence = Request(
                request_id=group.sequence_id(index),
                prompt_token_ids=token_ids,
                params=params_of(params, index),
                seed=seed_of(seed, index),
                max_total_tokens=limit,
                eos_token_ids=self._roles.eos,
                row_schedule=row_schedule,
                wants_prompt_logits=wants_prompt_logits,
            )
            group.trackers.append(RequestTracker(sequence, text, own_sink, self._roles.vocab_size))

    def _sinks(self, params: SamplingParams, given: TextSink | Sequence[TextSink] | None) -> list[TextSink | None]:
        """Where the ids of each output go."""
        if given is not None:
            sinks = list(given) if isinstance(given, Sequence) else [given]
            if len(sinks) != params.n:
                raise InvalidRequest("sink", f"<{len(sinks)} of them>", f"must be one for each of n={params.n} outputs")
            return [*sinks]
        if params.detokenize and self._tokenizer is not None:
            return [IncrementalDetokenizer(self._tokenizer, params) for _ in range(params.n)]
        if params.stop:
            raise InvalidRequest("stop", params.stop, "stop strings need a tokenizer, and this model folder has none")
        return [None] * params.n

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed & 0xFFFFFFFFFFFFFFFF
        return self._seeds.getrandbits(64) if self._seeds is not None else secrets.randbits(64)
