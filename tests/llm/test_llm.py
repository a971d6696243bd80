"""LLM against a scripted engine: order, laziness, isolation of bad prompts, interleaving."""

import itertools
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from abyssal.core.errors import ConfigError, InvalidRequest
from abyssal.core.outputs import CompletionOutput, RequestOutput
from abyssal.core.sampling_params import SamplingParams
from abyssal.llm import LLM


class ScriptedEngine:
    """Runs `max_num_seqs` requests at a time, a token a step. A prompt of ids [n, ..] generates n tokens: n, n+1, ..

    Text prompts count their characters. An id of 13 is refused; the prompt [7, 7] fails while it runs.
    """

    def __init__(self, max_num_seqs: int = 2) -> None:
        self.config = SimpleNamespace(max_num_seqs=max_num_seqs)
        self.tokenizer = self.chat = None
        self.queue: dict[str, RequestOutput] = {}
        self.most_queued = self.num_added = self.num_steps = 0
        self.params: dict[str, SamplingParams] = {}
        self.sinks: dict[str, object] = {}
        self.aborted: list[str] = []
        self.closed = False

    @property
    def has_unfinished(self) -> bool:
        return bool(self.queue)

    def add(self, prompt, params, *, request_id, sink=None, structured=None):
        ids = [len(prompt)] if isinstance(prompt, str) else list(prompt)
        if 13 in ids or not ids:
            raise InvalidRequest("prompt", prompt, "is unlucky")
        text = prompt if isinstance(prompt, str) else None
        self.queue[request_id] = RequestOutput(request_id, text, ids, [CompletionOutput(0, "", [])], False)
        self.params[request_id] = params
        self.sinks[request_id] = sink
        self.num_added += 1
        self.most_queued = max(self.most_queued, len(self.queue))
        return request_id

    def abort(self, request_id):
        del self.queue[request_id]
        self.aborted.append(request_id)

    def step(self):
        self.num_steps += 1
        outputs = []
        for output in list(self.queue.values())[: self.config.max_num_seqs]:
            completion = output.outputs[0]
            completion.token_ids.append(output.prompt_token_ids[0] + len(completion.token_ids))
            if output.prompt_token_ids == [7, 7]:
                output.finished, output.error, completion.finish_reason = True, "NaN in logits", "error"
            elif len(completion.token_ids) >= output.prompt_token_ids[0]:
                output.finished, completion.finish_reason = True, "length"
            if output.finished:
                del self.queue[output.request_id]
            outputs.append(replace(output))
        return outputs

    def close(self):
        self.queue.clear()
        self.closed = True


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def llm(engine: ScriptedEngine) -> LLM:
    return LLM.from_engine(engine)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_outputs_keep_the_order_of_prompts(llm: LLM) -> None:
    outputs = llm.generate([[3], [1], [2], [5], [1]], use_tqdm=False)
    assert ids_of(outputs) == [[3, 4, 5], [1], [2, 3], [5, 6, 7, 8, 9], [1]]
    assert [o.prompt_token_ids for o in outputs] == [[3], [1], [2], [5], [1]]


class Array:
    def __init__(self, items: list) -> None:
        self.items = items

    def tolist(self) -> list:
        return self.items


@pytest.mark.parametrize(
    ("prompts", "prompt_ids"),
    [
        ("abc", [[3]]),
        (["abc", "a"], [[3], [1]]),
        ([3, 1], [[3, 1]]),
        ([[3, 1], [2]], [[3, 1], [2]]),
        ((3, 1), [[3, 1]]),
        ({"prompt": "ab"}, [[2]]),
        ({"prompt_token_ids": [2, 9]}, [[2, 9]]),
        ([{"prompt": "ab"}, {"prompt_token_ids": [4]}, "a", [2]], [[2], [4], [1], [2]]),
        (Array([2, 3]), [[2, 3]]),
        (Array([[2, 3], [1, 1]]), [[2, 3], [1, 1]]),
        ([Array([2, 3])], [[2, 3]]),
        ([], []),
    ],
)
def test_forms_of_prompts(llm: LLM, prompts: object, prompt_ids: list) -> None:
    assert [o.prompt_token_ids for o in llm.generate(prompts, use_tqdm=False)] == prompt_ids


@pytest.mark.parametrize(
    "bad", [[13], {"prompt": 5}, {"prompt": "a", "more": 1}, {}, {"prompt_token_ids": "ab"}, 5, None, b"ab", []]
)
def test_a_bad_prompt_alone_fails(llm: LLM, bad: object) -> None:
    first, middle, last = llm.generate([[2], bad, [1]], use_tqdm=False)
    assert ids_of([first, last]) == [[2, 3], [1]]
    assert (first.error, last.error) == (None, None)
    assert middle.finished
    assert middle.outputs[0].finish_reason == "error"
    assert middle.error.startswith("prompt")


def test_only_bad_prompts(llm: LLM) -> None:
    """More of them than fit the queue, so that nothing ever runs."""
    assert [o.error is not None for o in llm.generate([[13]] * 50 + [[1]], use_tqdm=False)] == [True] * 50 + [False]


def test_a_request_that_fails_while_running_alone_fails(llm: LLM) -> None:
    outputs = llm.generate([[3], [7, 7], [2]], use_tqdm=False)
    assert [o.error for o in outputs] == [None, "NaN in logits", None]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]


@pytest.mark.parametrize("prompts", [5, None, b"ab", 1.5, {1, 2}, iter(["a"])])
def test_prompts_of_a_wrong_kind_raise(llm: LLM, prompts: object) -> None:
    with pytest.raises(TypeError, match="prompts must be"):
        llm.generate(prompts)


def test_sampling_params_for_all_or_for_each(llm: LLM, engine: ScriptedEngine) -> None:
    mine = SamplingParams(max_tokens=5)
    llm.generate(["a", "b"], mine, use_tqdm=False)
    llm.generate(["a", "b"], [mine, None], use_tqdm=False)
    assert list(engine.params.values())[:3] == [mine] * 3
    assert list(engine.params.values())[3] == SamplingParams(max_tokens=8192)


def test_length_without_max_tokens(llm: LLM, engine: ScriptedEngine) -> None:
    llm.generate("a", SamplingParams(min_tokens=10_000, top_k=3), use_tqdm=False)
    assert list(engine.params.values()) == [SamplingParams(min_tokens=10_000, top_k=3, max_tokens=10_000)]


def test_wrong_sampling_params_raise(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling_params=.*2"):
        llm.generate(["a", "b"], [SamplingParams()])
    for wrong in ({"temperature": 1}, [5], 5):
        with pytest.raises(TypeError, match="sampling_params must be"):
            llm.generate(["a"], wrong)


def test_engine_is_fed_lazily(llm: LLM, engine: ScriptedEngine) -> None:
    taken = itertools.count()
    prompts = ([1 + next(taken) % 3] for _ in range(100_000))
    completed = llm.as_completed(prompts)
    results = [next(completed) for _ in range(50)]
    assert engine.most_queued == 4
    assert next(taken) <= 55
    assert sorted(index for index, _ in results)[:40] == list(range(40))
    for index, output in results:
        assert output.prompt_token_ids == [1 + index % 3]
    completed.close()
    assert not engine.queue


def test_as_completed_yields_in_order_of_completion(llm: LLM) -> None:
    assert [index for index, _ in llm.as_completed([[4], [1], [1], [1]])] == [1, 2, 3, 0]


def test_as_completed_with_too_few_params(llm: LLM) -> None:
    with pytest.raises(ValueError, match="zip"):
        list(llm.as_completed(["a", "b"], [SamplingParams()]))


def test_an_exception_leaves_no_request_behind(llm: LLM, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> list:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3], [4]], use_tqdm=False)
    assert not engine.queue
    monkeypatch.undo()
    assert ids_of(llm.generate([[2]], use_tqdm=False)) == [[2, 3]]


def test_stream_is_cumulative(llm: LLM) -> None:
    seen = [list(o.outputs[0].token_ids) for o in llm.stream([3])]
    assert seen == [[3], [3, 4], [3, 4, 5]]


def test_leaving_a_stream_ends_its_request(llm: LLM, engine: ScriptedEngine) -> None:
    stream = llm.stream([5])
    assert engine.num_added == 0
    next(stream)
    stream.close()
    assert engine.aborted == ["llm-0"]
    assert list(llm.stream([1]))[-1].finished


def test_streams_and_batches_interleave(llm: LLM) -> None:
    one, two = llm.stream([4]), llm.stream([2])
    next(one)
    next(two)
    assert ids_of(llm.generate([[3]], use_tqdm=False)) == [[3, 4, 5]]
    assert ids_of(list(one)[-1:]) == [[4, 5, 6, 7]]
    assert ids_of(list(two)[-1:]) == [[2, 3]]


def test_stream_refuses_a_bad_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="unlucky"):
        next(llm.stream([13]))


def test_closing_ends_streams(llm: LLM, engine: ScriptedEngine) -> None:
    stream = llm.stream([5])
    next(stream)
    llm.close()
    assert engine.closed
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


class ScriptedChat:
    """Renders a conversation to one id for each message."""

    def render(self, messages, *, tools, thinking, effort):
        if not isinstance(messages, list):
            raise InvalidRequest("messages", messages, "must be a list")
        self.options = (tools, thinking, effort)
        return SimpleNamespace(
            token_ids=[len(messages)], default_max_tokens=99, parser=lambda params: ("parser", params.max_tokens)
        )


USER = {"role": "user", "content": "x"}


def test_chat(llm: LLM, engine: ScriptedEngine) -> None:
    engine.chat = ScriptedChat()
    outputs = llm.chat([USER, USER], use_tqdm=False, tools=[{}], thinking=True, effort="low")
    assert ids_of(outputs) == [[2, 3]]
    assert engine.chat.options == ([{}], True, "low")
    assert engine.params["llm-0"].max_tokens == 99
    assert engine.sinks["llm-0"] == (("parser", 99),)


def test_many_conversations_of_which_one_is_bad(llm: LLM, engine: ScriptedEngine) -> None:
    engine.chat = ScriptedChat()
    outputs = llm.chat([[USER] * 3, USER["role"], [USER]], SamplingParams(max_tokens=7), use_tqdm=False)
    assert ids_of([outputs[0], outputs[2]]) == [[3, 4, 5], [1]]
    assert outputs[1].error.startswith("messages")
    assert engine.params["llm-0"].max_tokens == 7


def test_stream_chat(llm: LLM, engine: ScriptedEngine) -> None:
    engine.chat = ScriptedChat()
    assert [list(o.outputs[0].token_ids) for o in llm.stream_chat([USER, USER])] == [[2], [2, 3]]


def test_no_parser_without_detokenization(llm: LLM, engine: ScriptedEngine) -> None:
    engine.chat = ScriptedChat()
    llm.chat([USER], SamplingParams(detokenize=False), use_tqdm=False)
    assert engine.sinks == {"llm-0": None}


def test_chat_without_tokenizer_says_so(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        next(llm.stream_chat([USER]))
    assert "tokenizer.json" in llm.chat([USER], use_tqdm=False)[0].error
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        llm.get_tokenizer()


@pytest.mark.parametrize("messages", ["hi", USER, 5])
def test_messages_of_a_wrong_kind_raise(llm: LLM, messages: object) -> None:
    with pytest.raises(TypeError, match="messages must be"):
        llm.chat(messages)


def test_progress_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2]])
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "hint"), [("max_num_seq", "max_num_seqs"), ("cache_byte", "cache_bytes"), ("zzz", "known are numerics")]
)
def test_unknown_settings_raise_before_anything_is_loaded(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"unknown setting '{name}'.*{hint}"):
        LLM("no/such/folder", **{name: 1})


def test_bad_settings_raise_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs=0"):
        LLM("no/such/folder", max_num_seqs=0)


def test_importing_the_package_and_llm_does_not_import_torch() -> None:
    code = "import sys, abyssal, abyssal.llm; abyssal.SamplingParams(); abyssal.LLM; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_names_of_the_package() -> None:
    import abyssal

    assert abyssal.LLM is LLM
    assert abyssal.SamplingParams is SamplingParams
    assert set(abyssal.__all__) <= set(dir(abyssal))
    with pytest.raises(AttributeError, match="no_such_name"):
        abyssal.no_such_name  # noqa: B018
