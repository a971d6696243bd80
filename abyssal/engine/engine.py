"""Engine: validates requests, runs steps, hands out outputs.

add -> Scheduler.add, for constrained requests once their grammar is compiled (ConstrainedRequests)
step: Scheduler.schedule -> StepPipeline.launch (ModelRunner.run) -> StepPipeline.take -> Scheduler.update -> RequestRegistry
      -> RequestTracker -> RequestOutput
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..config.engine import EngineConfig
from ..core.errors import ConfigError, InvalidRequest
from ..core.outputs import RequestOutput
from ..core.request import Request, RowSchedule
from ..core.sampling_params import SamplingParams
from ..runner.drafting import Oracle
from ..scheduler.speculation import Recorder
from ..structured.spec import StructuredOutput
from .admission import Admission
from .constrained import ConstrainedRequests
from .draft_scores import DraftProbe, DraftScores
from .drafts import check_speculation
from .group import SampleGroup
from .launch import EngineParts, launch
from .pipeline import StepPipeline
from .registry import RequestRegistry
from .stats import EngineCounters, EngineStats
from .tracker import TextSink


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
        self._admission = Admission(parts.tokenizer, parts.token_roles, parts.max_model_len, config.seed)
        self._cache, self._storage = parts.cache, parts.storage
        self._scheduler, self._runner = parts.scheduler, parts.runner
        self._drafts = parts.drafts
        self._pipeline = StepPipeline(parts.runner, overlap=config.overlap)
        self.constrained = ConstrainedRequests(parts.tokenizer, parts.token_roles)
        self._ready: list[RequestOutput] = []
        self._num_added = 0
        self._counters = EngineCounters()
        self._requests = RequestRegistry(parts.scheduler, self._counters)

    @property
    def stats(self) -> EngineStats:
        """Figures of this moment."""
        num_compiling = len(self.constrained)
        return self._counters.snapshot(self._scheduler, self._cache, self._runner, self._pipeline, num_compiling)

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
        params = self._admission.resolve(params)
        if structured is not None:
            self.constrained.check(structured)
            params = replace(params, ignore_eos=False)
        group = SampleGroup(request_id if request_id is not None else f"request-{self._num_added}")
        if any(group.sequence_id(index) in self._requests for index in range(params.n)):
            raise InvalidRequest("request_id", group.request_id, "is taken by an unfinished request; choose another")
        self._admission.fill(group, prompt, params, sink, row_schedule=row_schedule, wants_prompt_logits=wants_prompt_logits)
        self._num_added += 1
        self._requests.add(group)
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
                self._requests.end(sequence.request_id)
        if group.is_finished:
            self._ready.append(self._requests.output(group))

    def abort(self, request_id: str) -> None:
        """End a request; its output, with what was generated so far, comes from the next step. Unknown ids are ignored."""
        group = self._requests.group(request_id)
        if group is None:
            return
        self.constrained.abort(request_id)
        for tracker in group.trackers:
            self._scheduler.abort(tracker.request.request_id)
            self._requests.end(tracker.request.request_id)
        self._ready.append(self._requests.output(group))

    def step(self) -> list[RequestOutput]:
        """Launch a step, and take the results of the one before, or of this one if steps do not overlap.

        Returns:
            The requests that got a token or ended, text and ids cumulative.
        """
        is_idle = not self._scheduler.has_unfinished and not self._ready and not self._pipeline.num_out
        for group_id, sequences in self.constrained.take(may_wait=is_idle):
            group = self._requests.group(group_id)
            assert group is not None, f"request {group_id} was forgotten while its grammar was compiled"
            self._queue(group, sequences)
        outputs, self._ready = self._ready, []
        began = time.perf_counter()
        scheduled = self._scheduler.schedule()
        if scheduled.rows:
            scheduled = self._requests.begin(scheduled)
            self._counters.schedule_seconds += time.perf_counter() - began
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
        request = self._requests.sequence(request_id)
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
        for request_id in self._requests.request_ids:
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
        outputs = self._requests.take(self._scheduler.update(scheduled, result), scheduled, result)
        self._counters.took(time.perf_counter() - began, result.timing)
        return outputs
