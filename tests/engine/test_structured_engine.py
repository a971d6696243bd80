"""Constrained requests through the engine: with and without drafts, under preemption, and when their grammars fail."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import Future

import jsonschema
import pytest

from abyssal.config.engine import EngineConfig
from abyssal.core.errors import InvalidRequest
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.engine import Engine
from abyssal.runner.drafting import Drafts
from abyssal.structured.pool import CompilerBusy
from abyssal.structured.spec import StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["city", "days", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SETTINGS = {"num_threads": 1, "max_num_seqs": 8, "num_blocks": 48, "max_num_batched_tokens": 128}

SPECS = (
    {"json": SCHEMA},
    {"regex": "[a-c]{2,9}-[0-9]{3}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"grammar": 'root ::= "(" root ")" | [a-z]'},
    {"tools": [TOOL], "tool_choice": "required"},
    None,
)


def params_of(seed: int, **changes) -> SamplingParams:
    given = {"temperature": seed % 3 / 2, "seed": seed, "max_tokens": 90, "logprobs": 2 * (seed % 2)}
    given |= {"skip_special_tokens": False}
    return SamplingParams(**{**given, "top_p": (1.0, 0.9)[seed % 2], "frequency_penalty": (0, 0, 0.5)[seed % 3], **changes})


def spec_of(seed: int) -> StructuredOutput | None:
    given = SPECS[seed % len(SPECS)]
    return None if given is None else StructuredOutput(**given)


def drive(engine: Engine) -> dict:
    done = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        engine.check_integrity()
    return done


def outcome(output) -> list[tuple]:
    return [(c.token_ids, c.text, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs]


def run(engine: Engine, count: int) -> list:
    ids = [engine.add([1, 11 + i, 30 + 7 * i] * (1 + i % 3), params_of(i), structured=spec_of(i)) for i in range(count)]
    done = drive(engine)
    return [done[i] for i in ids]


def check_answer(spec: StructuredOutput, text: str) -> None:
    """The text satisfies its constraint, by an independent reader."""
    if spec.kind == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif spec.kind == "regex":
        assert re.fullmatch(str(spec.regex), text)
    elif spec.kind == "choice":
        assert text in spec.choice
    elif spec.kind == "grammar":
        depth = (len(text) - 1) // 2
        assert re.fullmatch("[a-z]", text[depth])
        assert text == "(" * depth + text[depth] + ")" * depth
    else:
        assert text.startswith("\n\n<｜DSML｜ calls>\n")
        assert text.endswith("</｜DSML｜ calls>")


@pytest.fixture(scope="module")
def engine(checkpoint_of):
    return Engine(checkpoint_of("micro"), EngineConfig(**SETTINGS))


@pytest.fixture(scope="module")
def expected(engine):
    return run(engine, 24)


def test_every_answer_satisfies_its_constraint(expected) -> None:
    finished = [
        (spec_of(i), output.outputs[0]) for i, output in enumerate(expected) if output.outputs[0].finish_reason == "stop"
    ]
    assert sum(spec is not None for spec, _ in finished) > 12
    for spec, completion in finished:
        if spec is not None:
            check_answer(spec, completion.text)


@pytest.mark.parametrize("speculation", [1, 3, "auto"])
def test_drafts_change_nothing(checkpoint_of, expected, speculation) -> None:
    engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=speculation, **SETTINGS))
    assert [outcome(o) for o in run(engine, 24)] == [outcome(o) for o in expected]
    assert speculation == "auto" or engine.stats.speculation.places[0].accepted > 10


def test_steps_that_do_not_overlap_give_the_same(checkpoint_of, expected) -> None:
    engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=2, overlap=False, **SETTINGS))
    assert [outcome(o) for o in run(engine, 12)] == [outcome(o) for o in expected[:12]]


def test_the_other_library(checkpoint_of) -> None:
    pytest.importorskip("xgrammar")
    outcomes = []
    for speculation in ("off", 3):
        engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=speculation, **SETTINGS))
        for i in range(8):
            given = SPECS[i % 4] if i % 4 else {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}}
            engine.add([1, 11 + i], params_of(i), structured=StructuredOutput(backend="xgrammar", **given))
        done = drive(engine)
        outcomes.append({request_id: outcome(output) for request_id, output in done.items()})
        for request_id, output in done.items():
            given, completion = SPECS[int(request_id.rpartition("-")[2]) % 4], output.outputs[0]
            assert output.error is None
            if completion.finish_reason == "stop" and "json" not in given:
                check_answer(StructuredOutput(**given), completion.text)
            elif completion.finish_reason == "stop":
                assert isinstance(json.loads(completion.text), list)
    assert outcomes[0] == outcomes[1]


def test_rejection_satisfies_constraints_too(checkpoint_of) -> None:
    engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=3, acceptance="rejection", **SETTINGS))
    outputs = run(engine, 18)
    assert engine.stats.speculation.places[0].accepted > 10
    for index, output in enumerate(outputs):
        assert output.error is None
        if spec_of(index) is not None and output.outputs[0].finish_reason == "stop":
            check_answer(spec_of(index), output.outputs[0].text)


def test_simulated_acceptance_keeps_legal_drafts(checkpoint_of) -> None:
    engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=3, **SETTINGS))
    engine.simulate_acceptance(0.7)
    for seed in range(6):
        engine.add("x", SamplingParams(seed=seed, max_tokens=60), structured=StructuredOutput(regex="(ab|cd|ef){15}"))
    for output in drive(engine).values():
        assert output.error is None
        assert re.fullmatch("(ab|cd|ef){15}", output.outputs[0].text)
    assert engine.stats.speculation.places[0].accepted > 10


def test_certain_tokens_are_drafted(checkpoint_of) -> None:
    """A text without a choice: after the first token everything that is drafted is accepted, with certainty."""
    engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=3, **SETTINGS))
    text = "the only answer that is possible here"
    for seed in range(4):
        engine.add("x", SamplingParams(temperature=1.0, seed=seed), structured=StructuredOutput(choice=[text]))
    assert {output.outputs[0].text for output in drive(engine).values()} == {text}
    places = engine.stats.speculation.places
    assert places[0].accepted == places[0].verified > 4
    assert all(place.calibration_error < 1e-6 for place in places if place.verified)


@pytest.mark.parametrize("wrong", ["first", "second"])
def test_illegal_drafts_are_refused(checkpoint_of, expected, wrong) -> None:
    """Drafts from elsewhere that the grammar forbids: none gets into the output."""
    engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=3, **SETTINGS))

    def oracle(request, drafts):
        ids = list(drafts.token_ids)
        ids[0 if wrong == "first" else 1 :] = [5] * (len(ids) - (wrong == "second"))
        return Drafts(ids[: len(drafts.token_ids)], drafts.confidence)

    engine.set_draft_oracle(oracle)
    assert [outcome(o) for o in run(engine, 10)] == [outcome(o) for o in expected[:10]]


def test_preemption_keeps_the_matcher(checkpoint_of, expected) -> None:
    tight = {**SETTINGS, "num_blocks": 3, "max_num_batched_tokens": 48}
    for speculation in ("off", 3):
        engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=speculation, **tight), shuffle_seed=3)
        longer = [1, *range(20, 110)]
        ids, want = [], []
        roomy = Engine(checkpoint_of("micro"), EngineConfig(**SETTINGS))
        schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 12, "maxItems": 15}
        for seed in range(3):
            spec, params = StructuredOutput(json=schema), SamplingParams(seed=seed, max_tokens=60, logprobs=0)
            ids.append(engine.add(longer, params, structured=spec))
            want.append(roomy.add(longer, params, structured=spec))
        done, right = drive(engine), drive(roomy)
        assert engine.stats.num_preemptions > 0
        assert [outcome(done[i]) for i in ids] == [outcome(right[i]) for i in want]


def test_outputs_of_one_request_have_matchers_of_their_own(engine) -> None:
    engine.add("x", SamplingParams(n=5, seed=3, max_tokens=60), structured=StructuredOutput(regex="[a-z]{3,20}!"))
    (output,) = drive(engine).values()
    texts = [completion.text for completion in output.outputs]
    assert len(set(texts)) == 5
    assert all(re.fullmatch("[a-z]{3,20}!", text) for text in texts)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_finished_grammar_beats_min_tokens(engine, ignore_eos) -> None:
    """Case 16: the answer ends where the grammar has nothing left, and not with token 0."""
    params = SamplingParams(temperature=0.0, min_tokens=16, max_tokens=30, ignore_eos=ignore_eos)
    engine.add("x", params, structured=StructuredOutput(json={"type": "boolean"}))
    (output,) = drive(engine).values()
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text in ("true", "false")
    assert len(output.outputs[0].token_ids) < 8


def test_min_tokens_counts_while_the_grammar_goes_on(engine) -> None:
    params = SamplingParams(seed=0, min_tokens=12, max_tokens=40)
    engine.add("x", params, structured=StructuredOutput(regex="(a|b|cd)*"))
    (output,) = drive(engine).values()
    assert len(output.outputs[0].token_ids) >= 12


def test_stop_id_inside_an_object(engine) -> None:
    """Case 14: a stop id that is text, and liked best, cannot cut the object."""
    stop = engine.tokenizer.encode("a", add_bos=False)[0]
    quote = engine.tokenizer.encode('"', add_bos=False)[0]
    params = SamplingParams(temperature=0.0, stop_token_ids=(stop,), logit_bias={stop: 100, quote: 50}, max_tokens=60)
    schema = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"], "additionalProperties": False}
    engine.add("x", params, structured=StructuredOutput(json=schema))
    (output,) = drive(engine).values()
    assert output.outputs[0].finish_reason == "stop"
    assert set(json.loads(output.outputs[0].text)) == {"b"}


def test_the_grammar_begins_behind_reasoning(engine) -> None:
    end = engine.tokenizer.token_id("</think>")
    spec = StructuredOutput(regex="[0-9]{3}", thinking=True)
    params = SamplingParams(seed=1, logit_bias={end: 8}, max_tokens=200, skip_special_tokens=False)
    engine.add("x<think>", params, structured=spec)
    (output,) = drive(engine).values()
    assert output.outputs[0].finish_reason == "stop"
    assert re.fullmatch("[0-9]{3}", output.outputs[0].text.rpartition("</think>")[2])


def test_the_thinking_budget_leads_into_the_grammar(engine) -> None:
    spec = StructuredOutput(regex="[0-9]{3}", thinking=True)
    params = SamplingParams(seed=1, thinking_token_budget=4, max_tokens=40, skip_special_tokens=False)
    engine.add("x<think>", params, structured=spec)
    (output,) = drive(engine).values()
    token_ids = output.outputs[0].token_ids
    assert token_ids.index(engine.tokenizer.token_id("</think>")) == 4
    assert re.fullmatch("[0-9]{3}", output.outputs[0].text.rpartition("</think>")[2])


def test_refused_at_add_with_its_place(engine) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    with pytest.raises(InvalidRequest, match=r"\$\.properties\.a\.not"):
        engine.add("x", SamplingParams(), structured=StructuredOutput(json=schema))
    with pytest.raises(InvalidRequest, match="look"):
        engine.add("x", SamplingParams(), structured=StructuredOutput(regex="a(?=b)"))
    with pytest.raises(InvalidRequest, match="structured"):
        engine.add("x", SamplingParams(), structured={"json": {}})
    assert not engine.has_unfinished


def test_no_token_left_fails_its_request(engine) -> None:
    """What the parameters forbid and the grammar needs: an error, and no token 0."""
    first = engine.tokenizer.encode("x", add_bos=False)[0]
    bad = engine.add("x", SamplingParams(allowed_token_ids=(first,)), structured=StructuredOutput(choice=["no"]))
    good = engine.add("x", SamplingParams(seed=0), structured=StructuredOutput(choice=["no"]))
    done = drive(engine)
    assert "the grammar, allowed_token_ids forbid all" in done[bad].error
    assert done[bad].outputs[0].finish_reason == "error"
    assert done[good].outputs[0].text == "no"


def test_masks_are_filled_while_the_model_runs(engine, monkeypatch) -> None:
    """The model returns only when the masks of its step are there: nobody fills them in its own thread."""
    real, filled = engine._runner._model.forward, []

    def forward(*args):
        filling = engine._runner._constraints._filling
        if filling is not None:
            masks, results = filling.result(timeout=20)
            filled.append(len(masks))
            assert all(result.error is None for result in results)
        return real(*args)

    monkeypatch.setattr(engine._runner._model, "forward", forward)
    for seed in range(3):
        engine.add("x", SamplingParams(seed=seed), structured=StructuredOutput(regex="[a-z]{5}"))
    assert all(re.fullmatch("[a-z]{5}", output.outputs[0].text) for output in drive(engine).values())
    assert 3 in filled


class SlowCompiler:
    """Stands before a compiler: what it is asked for stays open until somebody settles it."""

    def __init__(self, compiler) -> None:
        self._compiler = compiler
        self.held: list[Future] = []

    def check(self, spec) -> None:
        self._compiler.check(spec)

    def submit(self, spec):
        if spec.kind != "regex":
            return self._compiler.submit(spec)
        self.held.append(Future())
        return self.held[-1]


@pytest.fixture
def held(engine):
    """An engine that compiles regular expressions only when it is told to."""
    engine.constrained.check(StructuredOutput(regex="a"))
    compiler = engine.constrained.compiler
    engine.constrained.compiler = slow = SlowCompiler(compiler)
    yield slow
    engine.constrained.compiler = compiler
    for future in slow.held:
        if not future.done():
            future.set_exception(InvalidRequest("regex", "a", "the test is over"))
    drive(engine)


def test_others_run_while_a_grammar_compiles(engine, held) -> None:
    waiting = engine.add("x", SamplingParams(seed=0), structured=StructuredOutput(regex="a{3}"))
    other = engine.add("x", SamplingParams(seed=0, max_tokens=4))
    constrained = engine.add("x", SamplingParams(seed=0), structured=StructuredOutput(choice=["no"]))
    done = set()
    while len(done) < 2:
        done |= {output.request_id for output in engine.step() if output.finished}
    assert done == {other, constrained}
    assert engine.has_unfinished
    assert engine.stats.num_requests_waiting == 1
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.35:
        steps += 1
        assert engine.step() == []
    assert steps < 10, "a step waits where nothing else is to do"
    held.held[0].set_result(held._compiler.compile(StructuredOutput(regex="a{3}")))
    assert drive(engine)[waiting].outputs[0].text == "aaa"


def test_a_grammar_that_fails_fails_its_own_requests(engine, held) -> None:
    bad = engine.add("x", SamplingParams(n=2, temperature=1.0), structured=StructuredOutput(regex="a{3}"))
    good = engine.add("x", SamplingParams(seed=0), structured=StructuredOutput(choice=["no"]))
    held.held[0].set_exception(InvalidRequest("regex", "a{3}", "takes more than 10 s to compile; make it simpler"))
    done = drive(engine)
    assert done[good].outputs[0].text == "no"
    assert "takes more than 10 s" in done[bad].error
    assert [c.finish_reason for c in done[bad].outputs] == ["error", "error"]
    assert done[bad].outputs[0].token_ids == []


def test_a_compiler_that_is_busy_fails_that_request(engine, held, monkeypatch) -> None:
    def submit(spec):
        raise CompilerBusy("8 grammars over their time limit are still being compiled; try again later")

    monkeypatch.setattr(held, "submit", submit)
    bad = engine.add("x", SamplingParams(), structured=StructuredOutput(choice=["a"]))
    free = engine.add("x", SamplingParams(seed=0, max_tokens=3))
    done = drive(engine)
    assert "try again later" in done[bad].error
    assert done[free].error is None


def test_abort_while_compiling(engine, held) -> None:
    gone = engine.add("x", SamplingParams(n=2, temperature=1.0), structured=StructuredOutput(regex="a{3}"))
    engine.abort(gone)
    done = drive(engine)
    assert [c.finish_reason for c in done[gone].outputs] == ["abort", "abort"]
    held.held[0].set_exception(InvalidRequest("regex", "a{3}", "nobody asks any more"))
    again = engine.add("x", SamplingParams(seed=0), request_id=gone, structured=StructuredOutput(choice=["no"]))
    assert drive(engine)[again].outputs[0].text == "no"


def test_a_library_that_fails_harms_one_request(engine, monkeypatch) -> None:
    """The mask of one matcher raises in the middle of a step: the others of the same step go on."""
    from abyssal.structured.matcher import Matcher

    real, victims = Matcher.begin_walk, []

    def begin_walk(self, masks, first_row, drafts):
        if self.num_tokens == 2:
            victims.append(self)
            if self is victims[0]:
                raise RuntimeError("out of luck")
        return real(self, masks, first_row, drafts)

    monkeypatch.setattr(Matcher, "begin_walk", begin_walk)
    for seed in range(3):
        engine.add("x", SamplingParams(seed=seed), structured=StructuredOutput(regex="[a-z]{6}"))
    outputs = list(drive(engine).values())
    failed = [o for o in outputs if o.error is not None]
    assert [o.error for o in failed] == ["the grammar library failed: out of luck"]
    assert all(re.fullmatch("[a-z]{6}", o.outputs[0].text) for o in outputs if o.error is None)
