"""Compiling off the loop: cache, limits, and failures that stay with their own request."""

import threading
import time

import pytest

from abyssal.core.errors import InvalidRequest
from abyssal.structured.compiler import GrammarCompiler
from abyssal.structured.mask import allocate
from abyssal.structured.matcher import fill_many
from abyssal.structured.pool import MAX_GIVEN_UP, CompilePool, CompilerBusy
from abyssal.structured.spec import StructuredOutput


@pytest.fixture
def compiler(kit):
    compiler = GrammarCompiler(kit.vocabulary, num_threads=2, time_limit_s=5)
    yield compiler
    compiler.close()


def test_equal_specifications_are_compiled_once(compiler) -> None:
    first = compiler.compile(StructuredOutput(json={"type": "integer"}))
    assert compiler.compile(StructuredOutput(json='{"type":"integer"}')) is first
    assert compiler.compile(StructuredOutput(json={"type": "integer"}, max_whitespace=0)) is not first
    assert (compiler.stats.num_compiled, compiler.stats.num_cached) == (2, 1)


def test_what_is_asked_for_twice_at_once_is_compiled_once(compiler, monkeypatch) -> None:
    started, go = threading.Event(), threading.Event()
    original = compiler._compile

    def slow(spec: StructuredOutput):
        started.set()
        assert go.wait(10)
        return original(spec)

    monkeypatch.setattr(compiler, "_compile", slow)
    first = compiler.submit(StructuredOutput(regex="a"))
    assert started.wait(10)
    second = compiler.submit(StructuredOutput(regex="a"))
    go.set()
    assert first.result(10) is second.result(10)
    assert compiler.stats.num_compiled == 1


def test_the_cache_keeps_the_latest_within_its_limit(kit) -> None:
    probe = GrammarCompiler(kit.vocabulary)
    size = probe.compile(StructuredOutput(regex="a0")).size_bytes
    compiler = GrammarCompiler(kit.vocabulary, cache_bytes=3 * size + size // 2)
    specs = [StructuredOutput(regex=f"a{i}") for i in range(5)]
    for spec in specs[:3]:
        compiler.compile(spec)
    compiler.compile(specs[0])  # used again: now the second is the oldest
    compiler.compile(specs[3])
    compiled = compiler.stats.num_compiled
    compiler.compile(specs[0])
    assert compiler.stats.num_compiled == compiled
    compiler.compile(specs[1])
    assert compiler.stats.num_compiled == compiled + 1
    assert compiler.cached_bytes <= 3 * size + size // 2
    tiny = GrammarCompiler(kit.vocabulary, cache_bytes=10)
    assert kit.feed(tiny.compile(specs[0]).matcher(), kit.byte_ids("a0")) == 2
    assert tiny.cached_bytes == 0


def test_a_grammar_that_fails_fails_alone(compiler, kit) -> None:
    good = [compiler.submit(StructuredOutput(regex=f"x{i}")) for i in range(4)]
    bad = [compiler.submit(StructuredOutput(json={"properties": {"a": {"not": {"const": i}}}})) for i in range(4)]
    for future in bad:
        with pytest.raises(InvalidRequest, match=r"\$\.properties\.a\.not"):
            future.result(10)
    for i, future in enumerate(good):
        assert kit.feed(future.result(10).matcher(), kit.byte_ids(f"x{i}")) == 2
    assert compiler.stats.num_failed == 4


def test_a_grammar_that_takes_too_long_fails_alone(kit, monkeypatch) -> None:
    compiler = GrammarCompiler(kit.vocabulary, num_threads=1, time_limit_s=0.2)
    compiler.compile(StructuredOutput(regex="warm"))
    go, original = threading.Event(), compiler._compile

    def stuck(spec: StructuredOutput):
        if spec.regex == "slow":
            assert go.wait(30)
        return original(spec)

    monkeypatch.setattr(compiler, "_compile", stuck)
    monkeypatch.setattr(compiler, "_time_limit_s", 0.2)
    slow = compiler.submit(StructuredOutput(regex="slow"))
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.2 s"):
        slow.result(20)
    monkeypatch.setattr(compiler, "_time_limit_s", 20)
    assert compiler.compile(StructuredOutput(regex="next")).spec.regex == "next"
    go.set()
    assert compiler.compile(StructuredOutput(regex="slow")).spec.regex == "slow"


def test_too_many_stuck_threads_refuse_work_until_they_return() -> None:
    pool, go = CompilePool(2), threading.Event()
    late = ValueError("late")
    futures = [pool.submit(lambda: go.wait(30), 0.05, late) for _ in range(MAX_GIVEN_UP)]
    assert all(future.exception(20) is late for future in futures)
    with pytest.raises(CompilerBusy, match="try again later"):
        pool.submit(lambda: 1, 1, late)
    go.set()
    for _ in range(1000):
        if pool._num_given_up == 0:
            break
        threading.Event().wait(0.01)
    assert pool.submit(lambda: 1, 20, late).result(20) == 1
    pool.close()


def test_errors_of_a_job_reach_its_future_only() -> None:
    pool = CompilePool(1)

    def fail() -> None:
        raise RuntimeError("broken")

    failed = pool.submit(fail, 20, ValueError())
    assert str(failed.exception(20)) == "broken"
    cancelled = pool.submit(lambda: 1, 20, ValueError())
    cancelled.cancel()
    assert pool.submit(lambda: 2, 20, ValueError()).result(20) == 2
    pool.close()


def test_missing_parts_are_named(kit, corpus) -> None:
    import dataclasses

    bare = dataclasses.replace(kit.vocabulary, think_end_id=None, dsml_id=None)
    compiler = GrammarCompiler(bare)
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidRequest, match="no </think>"):
        compiler.compile(StructuredOutput(regex="a", thinking=True))
    with pytest.raises(InvalidRequest, match="no marker for tool calls"):
        compiler.compile(StructuredOutput(tools=tools))
    assert compiler.compile(StructuredOutput(tools=tools, tool_choice="none")).matcher().is_accepting


def test_an_extra_that_is_not_installed_is_named(compiler, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match="pip install xgrammar"):
        compiler.compile(StructuredOutput(regex="a", backend="xgrammar"))


def test_what_is_refused_at_once_is_what_compiling_refuses(compiler, corpus) -> None:
    """The check ahead of compiling, over random schemas: the same refusals with the same words."""
    outcomes = []
    for seed in range(150):
        schema = corpus.SchemaGenerator(seed).document()
        told = []
        for call in (compiler.check, compiler.compile):
            try:
                call(StructuredOutput(json=schema))
                told.append("")
            except InvalidRequest as error:
                told.append(str(error))
        assert told[0] == told[1] or not told[0], f"seed {seed}"
        outcomes.append(told)
    assert 20 < sum(bool(first) for first, _ in outcomes) < 130
    assert sum(bool(second) and not first for first, second in outcomes) < 20  # unsatisfiable ones, found by the library


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"regex": "a(?=b)"}, "look-ahead"),
        ({"grammar": "root ::= unknown"}, "unknown"),
        ({"json": True, "thinking": True, "max_whitespace": 0}, ""),
    ],
)
def test_checked_at_once(compiler, spec: dict, reason: str) -> None:
    if not reason:
        compiler.check(StructuredOutput(**spec))
    else:
        with pytest.raises(InvalidRequest, match=reason):
            compiler.check(StructuredOutput(**spec))
    assert compiler.stats.num_compiled == 0


def test_threads_that_fill_masks_have_their_own_copy(kit) -> None:
    """Forks of one matcher wait for each other: matchers are made of several in turn, and all are alike."""
    compiler = GrammarCompiler(kit.vocabulary, mask_threads=3)
    grammar = compiler.compile(StructuredOutput(json={"type": "array", "items": {"type": "integer"}}))
    matchers = [grammar.matcher() for _ in range(6)]
    families = [matcher._engine.family for matcher in matchers]
    assert len(set(families)) == 3
    assert families[:3] == families[3:]
    masks = allocate(24, kit.vocabulary.size)
    drafts = kit.byte_ids("[1,")
    order = [4, 0, 5, 2, 1, 3]
    results = fill_many([(matchers[i], 4 * i, drafts) for i in order], masks)
    assert [result.num_legal for result in results] == [3] * 6
    rows = masks.reshape(6, 4, -1)
    assert all((rows[i] == rows[0]).all() for i in range(6))
    assert (rows[0, 0] != rows[0, 1]).any()


def test_a_grammar_that_many_wait_for_is_compiled_more_often(kit, monkeypatch) -> None:
    compiler, go = GrammarCompiler(kit.vocabulary, mask_threads=2), threading.Event()
    original = compiler._compile

    def slow(spec: StructuredOutput):
        assert go.wait(10)
        return original(spec)

    monkeypatch.setattr(compiler, "_compile", slow)
    futures = [compiler.submit(StructuredOutput(regex="a{3}")) for _ in range(20)]
    go.set()
    (grammar,) = {future.result() for future in futures}
    assert len({grammar.matcher()._engine.family for _ in range(20)}) == compiler._backends["llguidance"].num_copies == 8
    again = compiler.compile(StructuredOutput(regex="a{4}"))
    assert len({again.matcher()._engine.family for _ in range(20)}) == 2
    assert not compiler._running
    assert not compiler._num_waiting


def test_a_slow_grammar_is_compiled_once(kit, monkeypatch) -> None:
    compiler = GrammarCompiler(kit.vocabulary, mask_threads=3)
    compiler.compile(StructuredOutput(regex="a"))
    backend, calls = compiler._backends["llguidance"], []
    real = backend.compile

    def compile_slowly(spec: StructuredOutput):
        calls.append(spec)
        time.sleep(0.25)
        return real(spec)

    monkeypatch.setattr(backend, "compile", compile_slowly)
    grammar = compiler.compile(StructuredOutput(regex="b"))
    assert len(calls) == 1
    assert grammar.matcher()._engine.family == grammar.matcher()._engine.family
