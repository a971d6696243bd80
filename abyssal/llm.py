"""LLM: offline inference in this process. It feeds the engine lazily, drives its steps, and keeps order.

generate, chat -> as_completed -> Engine.add / Engine.step
stream, stream_chat -> the same for one request, output by output
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from .config.engine import EngineConfig
from .config.env import prepare_process
from .core.errors import InvalidRequest
from .core.outputs import CompletionOutput, RequestOutput
from .core.sampling_params import SamplingParams
from .prompts import (
    ChatOptions,
    Job,
    Message,
    Params,
    Prompt,
    constraints_for,
    listed_conversations,
    listed_prompts,
    params_for,
    prompt_maker,
    with_length,
)

if TYPE_CHECKING:
    import torch

    from .engine.engine import Engine
    from .structured.spec import StructuredOutput
    from .text.tokenizer import Tokenizer

prepare_process()


class LLM:
    """A model in this process.

    Not thread-safe, but streams and batches may be interleaved in one thread. Closing it, or leaving it as a context
    manager, gives up the caches.
    """

    def __init__(
        self, model: str | Path, *, revision: str | None = None, assume_yes: bool = True, **engine_settings: Any
    ) -> None:
        """Load a model.

        Args:
            model: a folder, a hub id, or `flash` for the released model.
            revision: branch, tag or commit of a hub model.
            assume_yes: download without asking on a terminal.
            **engine_settings: fields of `EngineConfig`.

        Raises:
            TypeError: for an unknown setting, naming the closest known one.
            AbyssalError: if the model cannot be found, read, or held in memory.
        """
        _refuse_unknown(engine_settings)
        config = EngineConfig(**engine_settings)
        from .engine.engine import Engine

        self._begin(Engine(model, config, revision=revision, assume_yes=assume_yes))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Wrap an engine that exists already."""
        llm = cls.__new__(cls)
        llm._begin(engine)
        return llm

    def _begin(self, engine: Engine) -> None:
        self._engine = engine
        self._counter = itertools.count()
        self._receivers: dict[str, Callable[[RequestOutput], None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine, for statistics and for driving its steps by hand."""
        return self._engine

    def close(self) -> None:
        """Abort what runs and give up memory."""
        self._receivers.clear()
        self._engine.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            InvalidRequest: if the model folder has none.
        """
        if self._engine.tokenizer is None:
            raise InvalidRequest("tokenizer", None, "this model folder has no tokenizer.json; give prompts as token ids")
        return self._engine.tokenizer

    def score(self, token_ids: Sequence[int], *, chunk: int | None = None, decode_from: int | None = None) -> torch.Tensor:
        """Logits of every position, float32 [tokens, vocab], computed as generation computes them.

        Args:
            chunk: rows of one step at most.
            decode_from: positions from here on are fed one a step.
        """
        return self._engine.score(token_ids, chunk=chunk, decode_from=decode_from)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        structured: StructuredOutput | Sequence[StructuredOutput | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: a text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`, or a sequence of these.
                Text gets BOS in front; ids are taken as they are.
            sampling_params: for all prompts, or one for each; None for the defaults.
            use_tqdm: show progress.
            structured: what outputs have to satisfy, for all prompts or one for each.

        Returns:
            One output for each prompt, in their order. A prompt that cannot be served has `error` set and finish reason
            "error"; the others are unaffected.

        Raises:
            TypeError: if the argument as a whole is of the wrong kind.
            InvalidRequest: if the numbers of prompts and parameters differ.
        """
        listed = listed_prompts(prompts)
        params = params_for(sampling_params, len(listed))
        constraints = constraints_for(structured, len(listed))
        makers = (prompt_maker(*job) for job in zip(listed, params, constraints, strict=True))
        return self._gather(self._run(makers), len(listed), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        structured: StructuredOutput | None = None,
        thinking: bool = False,
        effort: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them.

        Args:
            messages: dicts with `role` and `content` as in OpenAI's API.
            tools: function tools that may be called, in OpenAI's form.
            tool_choice: "auto" (what None means), "none", "required", or an object that names a function. Calls satisfy
                their schemas where they are required, and where a function has `"strict": true`.
            parallel_tool_calls: False for one call at most.
            response_format: OpenAI's `json_object` or `json_schema`, which the text satisfies.
            structured: what the text has to satisfy, in place of `response_format`.
            thinking: let the model reason first; the reasoning comes back apart from the text, and under no constraint.
            effort: how much: "low", "high" (what None means) or "max".

        Returns:
            As `generate`; `outputs[0]` has `reasoning` and `tool_calls` too.
        """
        conversations = listed_conversations(messages)
        params = params_for(sampling_params, len(conversations))
        options = ChatOptions(tools, tool_choice, parallel_tool_calls, response_format, structured, thinking, effort)
        jobs = (
            self._chat_maker(conversation, own, options) for conversation, own in zip(conversations, params, strict=True)
        )
        return self._gather(self._run(jobs), len(conversations), use_tqdm)

    def as_completed(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams | None] | None = None,
        *,
        structured: StructuredOutput | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete any number of prompts in bounded memory, taken from the iterable as the engine gets room.

        Args:
            structured: what all outputs have to satisfy.

        Yields:
            (position of the prompt, its finished output), in the order in which they finish.
        """
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return self._run(prompt_maker(prompt, sampling_params, structured) for prompt in prompts)
        pairs = zip(prompts, sampling_params, strict=True)
        return self._run(prompt_maker(prompt, own, structured) for prompt, own in pairs)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        structured: StructuredOutput | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, with an output whenever it grew. Text and ids are cumulative.

        Nothing happens before the first output is asked for; leaving the loop early ends the request.

        Raises:
            InvalidRequest: if the prompt cannot be served.
        """
        return self._stream(prompt_maker(prompt, sampling_params, structured))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        structured: StructuredOutput | None = None,
        thinking: bool = False,
        effort: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, with an output whenever the answer grew. See `chat` and `stream`."""
        options = ChatOptions(tools, tool_choice, parallel_tool_calls, response_format, structured, thinking, effort)
        return self._stream(self._chat_maker(messages, sampling_params, options))

    def _chat_maker(
        self, messages: Sequence[Message], params: SamplingParams | None, options: ChatOptions
    ) -> Callable[[], Job]:
        def make() -> Job:
            if self._engine.chat is None:
                raise InvalidRequest("messages", messages, "chat needs a tokenizer.json in the model folder")
            constraint = options.constraint()
            prompt = self._engine.chat.render(
                messages, tools=options.shown_tools, thinking=options.thinking, effort=options.effort
            )
            own = with_length(params, prompt.default_max_tokens)
            parsers = tuple(prompt.parser(own) for _ in range(own.n)) if own.detokenize else ()
            if constraint is not None:
                constraint = constraint.after_reasoning(prompt.ends_in_reasoning)
            return Job(prompt.token_ids, own, parsers, constraint)

        return make

    def _run(self, makers: Iterable[Callable[[], Job]]) -> Iterator[tuple[int, RequestOutput]]:
        """Keep the engine fed from `makers`; yield what finishes. Aborts what is left when abandoned."""
        room = 2 * self._engine.config.max_num_seqs
        waiting = enumerate(makers)
        running: dict[str, int] = {}
        finished: deque[tuple[int, RequestOutput]] = deque()

        def receive(output: RequestOutput) -> None:
            if output.finished:
                finished.append((running.pop(output.request_id), output))

        try:
            while True:
                taken = list(itertools.islice(waiting, room - len(running)))
                for index, make in taken:
                    try:
                        running[self._submit(make(), receive)] = index
                    except InvalidRequest as error:
                        finished.append((index, self._refused(error)))
                while finished:
                    yield finished.popleft()
                if running:
                    self._step()
                elif not taken:
                    return
        finally:
            self._abandon(running)

    def _stream(self, make: Callable[[], Job]) -> Iterator[RequestOutput]:
        # One place is enough: outputs are cumulative, and another stream's steps may overtake this one's reader.
        newest: deque[RequestOutput] = deque(maxlen=1)
        request_id = self._submit(make(), newest.append)
        finished = False
        try:
            while not finished:
                while not newest:
                    self._step()
                output = newest.popleft()
                finished = output.finished
                yield output
        finally:
            self._abandon([request_id])

    def _submit(self, job: Job, receive: Callable[[RequestOutput], None]) -> str:
        request_id = f"llm-{next(self._counter)}"
        sink = job.parsers or None
        self._engine.add(job.prompt, job.params, request_id=request_id, sink=sink, structured=job.structured)
        self._receivers[request_id] = receive
        return request_id

    def _step(self) -> None:
        if not self._engine.has_unfinished:
            raise RuntimeError("the LLM was closed while this request ran")
        for output in self._engine.step():
            receive = self._receivers.get(output.request_id)
            if output.finished:
                self._receivers.pop(output.request_id, None)
            if receive is not None:
                receive(output)

    def _abandon(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            if self._receivers.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _refused(self, error: InvalidRequest) -> RequestOutput:
        completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
        return RequestOutput(f"llm-{next(self._counter)}", None, [], [completion], finished=True, error=str(error))

    def _gather(self, completed: Iterator[tuple[int, RequestOutput]], total: int, use_tqdm: bool) -> list[RequestOutput]:
        """Outputs in the order of their prompts."""
        outputs: dict[int, RequestOutput] = {}
        with _progress(total, use_tqdm) as advance:
            for index, output in completed:
                outputs[index] = output
                advance(output)
        return [outputs[index] for index in range(total)]


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise TypeError(f"LLM() got an unknown setting {name!r}; {hint}")


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """A progress bar of prompts with the speed in tokens."""
    if not shown:
        yield lambda output: None
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    with tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True) as bar:
        started, tokens_in, tokens_out = time.monotonic(), 0, 0

        def advance(output: RequestOutput) -> None:
            nonlocal tokens_in, tokens_out
            tokens_in += len(output.prompt_token_ids)
            tokens_out += sum(len(c.token_ids) for c in output.outputs)
            elapsed = max(time.monotonic() - started, 1e-9)
            bar.set_postfix_str(f"in {tokens_in / elapsed:.1f} tok/s, out {tokens_out / elapsed:.1f} tok/s", refresh=False)
            bar.update(1)

        yield advance
