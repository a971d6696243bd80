"""Engine: validates requests, runs steps, hands out outputs.

add -> Scheduler.add, for constrained requests once their grammar is compiled (ConstrainedRequests)
step: Scheduler.schedule -> StepPipeline.launch (ModelRunner.run) -> StepPipeline.take -> Scheduler.update -> RequestTracker
      -> RequestOutput
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..config.engine import EngineConfig
from ..core.batch import RunnerOutput, SampledToken, SchedulerOutput
from ..core.errors import ConfigError, InvalidRequest
from ..core.outputs import RequestOutput
from ..core.request import Request, RowSchedule
from ..core.sampling_params import SamplingParams
from ..runner.drafting import Oracle
from ..scheduler.speculation import Recorder
from ..structured.spec import StructuredOutput
from ..text.detokenizer import IncrementalDetokenizer
from .constrained import ConstrainedRequests
from .draft_scores import DraftProbe, DraftScores
from .drafts import check_speculation
from .group import SampleGroup, params_of
from .launch import EngineParts, launch
from .pipeline import StepPipeline
from .preparation import prompt_ids, resolve_params, seed_of
from .stats import EngineStats
from .tracker import RequestTracker, TextSink


class Engine:
    """A model ready to serve. Not thread-safe; one step at a time.

    Attributes:
        folder: where the model was found.
        config: the settings, every "auto" decided but that of `speculation`.
        model_config: the model's configuration.
        tokenizer: None if the model folder has none; then prompts are token ids.
        chat: renders conversations; None without a tokenizer.
        max_model_len: tokens of one sequence at most.
        constrained: requests whose grammar is being compiled, and the compiler.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        *,
        revision: str | None = None,
        assume_yes: bool = True,
        shuffle_seed: int | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: a folder, a hub id, or `flash`.
            revision: of a hub model.
            assume_yes: download without asking.
            shuffle_seed: hand out cache blocks and slots in a random order (tests).

        Raises:
            AbyssalError: of the kind that says what is wrong with the model, the settings, or the machine.
        """
        self._assemble(launch(model, config, revision=revision, assume_yes=assume_yes, shuffle_seed=shuffle_seed))

    @classmethod
    def of(cls, parts: EngineParts) -> Engine:
        """An engine of parts that were made otherwise."""
        engine = cls.__new__(cls)
        engine._assemble(parts)
        return engine

    def _assemble(self, parts: EngineParts) -> None:
        config = parts.config
        self.folder, self.config, self.model_config = parts.folder, parts.config, parts.model_config
        self.tokenizer, self.chat = parts.tokenizer, parts.chat
        self.max_model_len = parts.max_model_len
        self.op_table = parts.op_table
        self._roles = parts.token_roles
        self._cache, self._storage = parts.cache, parts.storage
        self._scheduler, self._runner = parts.scheduler, parts.runner
        self._drafts = parts.drafts
        self._pipeline = StepPipeline(parts.runner, overlap=config.overlap)
        self.constrained = ConstrainedRequests(parts.tokenizer, parts.token_roles)
        self._trackers: dict[str, RequestTracker] = {}
        self._groups: dict[str, SampleGroup] = {}  # by the id of each of their sequences
        self._ready: list[RequestOutput] = []
        self._seeds = random.Random(config.seed) if config.seed is not None else None
        self._num_added = self._num_steps = self._num_prompt_tokens = self._num_generated = 0
        self._schedule_seconds = self._update_seconds = self._prepare_seconds = self._compute_seconds = 0.0

    @property
    def stats(self) -> EngineStats:
        """Figures of this moment."""
        scheduler = self._scheduler
        return EngineStats(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting + len(self.constrained),
            kv_cache_usage=self._cache.usage,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generated,
            num_rows=self._runner.num_rows,
            num_decoder_rows=self._runner.num_decoder_rows,
            schedule_seconds=self._schedule_seconds,
            update_seconds=self._update_seconds,
            prepare_seconds=self._prepare_seconds,
            compute_seconds=self._compute_seconds,
            idle_seconds=self._pipeline.idle_seconds,
            speculation=None if scheduler.speculation is None else scheduler.speculation.acceptance.stats(),
        )

    def set_speculation(self, speculation: str | int) -> None:
        """Draft otherwise from now on; the counts of drafts begin anew. For measurements.

        Raises:
            ConfigError: if the engine was built without a drafter, has requests, or cannot draft that many.
        """
        config = replace(self.config, speculation=speculation)
        if self.has_unfinished:
            raise ConfigError(f"speculation={speculation!r}: cannot be changed while requests are unfinished")
        if self._drafts is None and check_speculation(self.model_config.text, config):
            raise ConfigError(f"speculation={speculation!r}: this engine was built with speculation=off, without a drafter")
        if self._drafts is not None:
            check_speculation(self.model_config.text, config)
            self._settle()
            self._drafts.install(speculation, self._scheduler, self._runner)
        self.config = config

    def set_draft_oracle(self, oracle: Oracle | None) -> None:
        """Replace what is drafted from now on, until `set_speculation` (tests; simulated acceptance in measurements)."""
        assert self._runner.drafting is not None, "nothing is drafted"
        self._runner.drafting.oracle = oracle

    def simulate_acceptance(self, share: float) -> None:
        """Keep each draft with this probability from now on, until `set_speculation`. The text then means nothing."""
        if self._drafts is not None:
            self._drafts.simulate(share, self._runner)

    def record_drafts(self, recorder: Recorder | None) -> None:
        """Tell of each request's judged drafts from now on, until `set_speculation`."""
        assert self._scheduler.speculation is not None, "nothing is drafted"
        self._scheduler.speculation.recorder = recorder

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do or return anything."""
        return self._scheduler.has_unfinished or bool(self._ready) or len(self.constrained) > 0

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        row_schedule: RowSchedule = RowSchedule(),  # noqa: B008 (frozen)
        wants_prompt_logits: bool = False,
        sink: TextSink | Sequence[TextSink] | None = None,
        structured: StructuredOutput | None = None,
    ) -> str:
        """Queue a request.

        Args:
            prompt: text, which gets BOS if it has none, or token ids, which are taken as they are.
            request_id: must differ from those of unfinished requests; None makes one up.
            sink: takes the generated ids (a chat parser), one for each of `params.n` outputs; None for plain text.
            structured: what the output has to satisfy; the request starts when its grammar is compiled. Its end is the
                grammar's: `ignore_eos` has no effect, and a finished grammar ends the request before `min_tokens` too.

        Returns:
            The request's id.

        Raises:
            InvalidRequest: nothing was queued.
        """
        token_ids = prompt_ids(prompt, self.tokenizer, self.model_config.text.vocab_size)
        limit = self.max_model_len + 1 if wants_prompt_logits else self.max_model_len
        if len(token_ids) >= limit:
            raise InvalidRequest(
                "prompt",
                f"<{len(token_ids)} tokens>",
                f"must be shorter than max_model_len={limit} tokens to leave room for one more",
            )
        params = resolve_params(params, self._roles, self.tokenizer)
        if structured is not None:
            self.constrained.check(structured)
            params = replace(params, ignore_eos=False)
        group = SampleGroup(request_id if request_id is not None else f"request-{self._num_added}")
        for index in range(params.n):
            if group.sequence_id(index) in self._groups:
                raise InvalidRequest("request_id", group.request_id, "is taken by an unfinished request; choose another")
        seed, text = self._seed(params), prompt if isinstance(prompt, str) else None
        for index, own_sink in enumerate(self._sinks(params, sink)):
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
        self._num_added += 1
        self._trackers |= {tracker.request.request_id: tracker for tracker in group.trackers}
        self._groups |= {tracker.request.request_id: group for tracker in group.trackers}
        sequences = [tracker.request for tracker in group.trackers]
        if structured is not None:
            self.constrained.add(group.request_id, structured, sequences)
        else:
            self._queue(group, sequences)
        return group.request_id

    def _queue(self, group: SampleGroup, sequences: Sequence[Request]) -> None:
        """Hand sequences to the scheduler; those that can never run, or have failed before, end here."""
        for sequence in sequences:
            if not sequence.is_finished:
                self._scheduler.add(sequence)
            if sequence.is_finished:
                del self._trackers[sequence.request_id]
        if group.is_finished:
            self._ready.append(self._output(group))

    def abort(self, request_id: str) -> None:
        """End a request; its output, with what was generated so far, comes from the next step. Unknown ids are ignored."""
        group = self._groups.get(request_id)
        if group is None or group.request_id != request_id:
            return
        self.constrained.abort(request_id)
        for tracker in group.trackers:
            self._scheduler.abort(tracker.request.request_id)
            self._trackers.pop(tracker.request.request_id, None)
        self._ready.append(self._output(group))

    def step(self) -> list[RequestOutput]:
        """Launch a step, and take the results of the one before, or of this one if steps do not overlap.

        Returns:
            The requests that got a token or ended, text and ids cumulative.
        """
        is_idle = not self._scheduler.has_unfinished and not self._ready and not self._pipeline.num_out
        for group_id, sequences in self.constrained.take(may_wait=is_idle):
            self._queue(self._groups[group_id], sequences)
        outputs, self._ready = self._ready, []
        began = time.perf_counter()
        scheduled = self._scheduler.schedule()
        if scheduled.rows:
            scheduled = self._begin(scheduled)
            self._schedule_seconds += time.perf_counter() - began
            self._pipeline.launch(scheduled)
        if self._pipeline.is_full or (self._pipeline.num_out and not scheduled.rows):
            outputs += self._take()
        if not self.has_unfinished:
            self._pipeline.rest()
        return outputs

    def score(self, token_ids: Sequence[int], *, chunk: int | None = None, decode_from: int | None = None) -> torch.Tensor:
        """Logits of every position, computed by the same path as generation.

        Args:
            chunk: rows of one step at most.
            decode_from: positions from here on are fed one a step.

        Returns:
            float32 [tokens, vocab].

        Raises:
            InvalidRequest: for ids the model does not know, or too many.
        """
        return self._score(token_ids, RowSchedule(chunk, decode_from))

    def score_drafts(
        self,
        token_ids: Sequence[int],
        anchors: Sequence[int],
        previous_ids: torch.Tensor,
        *,
        chunk: int | None = None,
        decode_from: int | None = None,
    ) -> DraftScores:
        """`score`, and the drafter's results at anchors of the text.

        Args:
            anchors: positions whose token begins a draft block.
            previous_ids: [anchors, block], the token before each drafted one.

        Raises:
            InvalidRequest: for ids, anchors or chains that do not fit, or while other requests run.
        """
        if self._drafts is None or self._runner.drafting is None:
            raise InvalidRequest(
                "speculation", self.config.speculation, "leaves the drafter out; ask for any number of drafts"
            )
        if self.has_unfinished:
            raise InvalidRequest("token_ids", f"<{len(token_ids)} tokens>", "drafts are scored only while nothing else runs")
        vocab_size = self.model_config.text.vocab_size
        probe = DraftProbe(self._drafts.model, token_ids, anchors, previous_ids, vocab_size)
        self._settle()
        used, overlap = self._scheduler.speculation, self._pipeline.overlap
        self._drafts.watch(self._scheduler)
        self._pipeline.overlap = False  # the probe looks into the caches between steps
        try:
            logits = self._score(token_ids, RowSchedule(chunk, decode_from, probe.anchors), probe)
        finally:
            self._scheduler.speculation, self._pipeline.overlap = used, overlap
        features = self._runner.last_features
        assert features is not None, "a step with a drafter observes features"
        return probe.scores(logits, features[-1])

    def _score(self, token_ids: Sequence[int], schedule: RowSchedule, probe: DraftProbe | None = None) -> torch.Tensor:
        for name, value in (("chunk", schedule.chunk), ("decode_from", schedule.decode_from)):
            if value is not None and value < 1:
                raise InvalidRequest(name, value, "must be at least 1")
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        request_id = self.add(list(token_ids), params, row_schedule=schedule, wants_prompt_logits=True)
        request = self._trackers[request_id].request if request_id in self._trackers else None
        others: list[RequestOutput] = []
        while True:
            if probe is not None and request is not None and not request.is_finished:
                # before the first step no row is visible, so any slot will do
                slot = self._cache.slot(request_id) or 0
                probe.visit(request.num_computed_tokens, slot, self._storage)
            for output in self.step():
                if output.request_id == request_id and output.finished:
                    self._ready.extend(others)
                    if output.prompt_logits is None or output.error is not None:
                        raise InvalidRequest("token_ids", f"<{len(token_ids)} tokens>", output.error or "aborted")
                    return output.prompt_logits
                if output.request_id != request_id:
                    others.append(output)

    def close(self) -> None:
        """Abort what is left, and wait for the step that is out."""
        for request_id in list(self._groups):
            self.abort(request_id)
        self._pipeline.close()
        self._ready.clear()
        self.constrained.close()

    def check_integrity(self) -> None:
        """Compare scheduler and caches (tests). Raises AssertionError naming what is wrong."""
        self._scheduler.check_integrity()

    def fill_caches(self, value: float) -> None:
        """Overwrite all cache rows (tests: what was not written must not be read)."""
        self._settle()
        self._storage.fill(value)

    def _settle(self) -> None:
        """Take the results of all steps that are out."""
        while self._pipeline.num_out:
            self._ready += self._take()
        self._pipeline.rest()

    def _take(self) -> list[RequestOutput]:
        """Take the results of the oldest step that is out."""
        scheduled, result = self._pipeline.take()
        began = time.perf_counter()
        outputs = self._update(scheduled, result)
        self._update_seconds += time.perf_counter() - began
        if result.timing is not None:
            self._prepare_seconds += result.timing.preparation
            self._compute_seconds += result.timing.total - result.timing.preparation
        return outputs

    def _begin(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Note who starts in a step, and tell the runner where their prompts end."""
        now = time.monotonic()
        assignments = []
        for assignment in scheduled.assignments:
            tracker = self._trackers[assignment.request_id]
            tracker.metrics.first_scheduled_time = tracker.metrics.first_scheduled_time or now
            assignments.append(replace(assignment, num_prompt_tokens=tracker.request.num_prompt_tokens))
        return replace(scheduled, assignments=tuple(assignments))

    def _update(self, scheduled: SchedulerOutput, result: RunnerOutput) -> list[RequestOutput]:
        self._num_steps += 1
        rows_of = {rows.request_id: rows for rows in scheduled.rows}
        changed: dict[str, SampleGroup] = {}
        for request in self._scheduler.update(scheduled, result):
            request_id = request.request_id
            rows, tracker = rows_of[request_id], self._trackers[request_id]
            num_known = rows.num_rows - rows.num_drafts
            self._num_prompt_tokens += num_known - int(rows.samples and num_known == 1)
            tracker.take_prompt_rows(
                rows.start, result.prompt_logprobs.get(request_id, ()), result.prompt_logits.get(request_id)
            )
            sampled = result.sampled.get(request_id, [])
            self._take_tokens(tracker, sampled)
            if request.is_finished:
                del self._trackers[request_id]
            if sampled or request.is_finished:
                group = self._groups[request_id]
                changed[group.request_id] = group
        return [self._output(group) for group in changed.values()]

    def _output(self, group: SampleGroup) -> RequestOutput:
        """What a request has come to; it is forgotten once it is finished."""
        if group.is_finished:
            for tracker in group.trackers:
                del self._groups[tracker.request.request_id]
        return group.output()

    def _sinks(self, params: SamplingParams, given: TextSink | Sequence[TextSink] | None) -> list[TextSink | None]:
        """Where the ids of each output go."""
        if given is not None:
            sinks = list(given) if isinstance(given, Sequence) else [given]
            if len(sinks) != params.n:
                raise InvalidRequest("sink", f"<{len(sinks)} of them>", f"must be one for each of n={params.n} outputs")
            return [*sinks]
        if params.detokenize and self.tokenizer is not None:
            return [IncrementalDetokenizer(self.tokenizer, params) for _ in range(params.n)]
        if params.stop:
            raise InvalidRequest("stop", params.stop, "stop strings need a tokenizer, and this model folder has none")
        return [None] * params.n

    def _take_tokens(self, tracker: RequestTracker, sampled: Sequence[SampledToken]) -> None:
        """Hand a request's new tokens on one by one; a stop string drops those behind it."""
        request = tracker.request
        num_new = len(request.output_token_ids) - tracker.num_tokens
        for token in sampled[:num_new]:
            self._num_generated += 1
            tracker.take_token(token)
            if tracker.stop_string is not None:
                break
        if tracker.stop_string is None:
            return
        if not request.is_finished:
            self._scheduler.stop(request.request_id, tracker.stop_string, num_output_tokens=tracker.num_tokens)
        elif tracker.num_tokens < len(request.output_token_ids):
            request.end_earlier(tracker.num_tokens, tracker.stop_string)

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed & 0xFFFFFFFFFFFFFFFF
        return self._seeds.getrandbits(64) if self._seeds is not None else secrets.randbits(64)
