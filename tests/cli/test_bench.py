"""The arithmetic of `bench offline`, on a scripted engine and a clock that only steps move."""

from types import SimpleNamespace

import pytest

from abyssal.cli.bench import OfflineWorkload, measure
from abyssal.core.errors import AbyssalError
from abyssal.core.outputs import CompletionOutput, RequestOutput


class ScriptedEngine:
    """A step runs at most one prompt, and decodes all requests that have a token; each of the two takes its time."""

    PREFILL_S, DECODE_S = 4.0, 0.5

    def __init__(self) -> None:
        text = SimpleNamespace(vocab_size=20)
        self.model_config = SimpleNamespace(text=text, bos_token_id=0, eos_token_id=1, pad_token_id=2, image_token_id=9)
        self.now = 0.0
        self.running: dict[str, tuple[list[int], list[int], int]] = {}
        self.prompts: list[list[int]] = []
        self.fails = False

    def clock(self) -> float:
        return self.now

    def add(self, prompt: list[int], params: object) -> str:
        assert params.ignore_eos
        assert not params.detokenize
        request_id = str(len(self.prompts))
        self.prompts.append(prompt)
        self.running[request_id] = (prompt, [], params.max_tokens)
        return request_id

    def step(self) -> list[RequestOutput]:
        fresh = next((r for r, (_, ids, _) in self.running.items() if not ids), None)
        decoding = [r for r, (_, ids, _) in self.running.items() if ids]
        self.now += (self.PREFILL_S if fresh is not None else 0.0) + (self.DECODE_S if decoding else 0.0)
        return [self.advance(r) for r in ([fresh] if fresh is not None else []) + decoding]

    def advance(self, request_id: str) -> RequestOutput:
        prompt, ids, most = self.running[request_id]
        ids.append(5)
        finished = len(ids) == most
        if finished:
            del self.running[request_id]
        error = "NaN" if self.fails else None
        return RequestOutput(request_id, None, prompt, [CompletionOutput(0, "", ids)], finished, error=error)


def test_one_stream() -> None:
    engine = ScriptedEngine()
    drawn: list[int] = []
    result = measure(engine, OfflineWorkload(100, 11, 1, 1), clock=engine.clock, advance=drawn.append)
    assert result.prefill_tok_s == 100 / 4.0
    assert result.decode_tok_s == 1 / 0.5
    assert (result.ttft_ms, result.tpot_ms) == (4000.0, 500.0)
    assert result.elapsed_s == 4.0 + 10 * 0.5
    assert result.total_tok_s == 111 / 9.0
    assert drawn == [1] * 11


def test_a_wave_of_three() -> None:
    """Prompts end at 4, 8.5 and 13 s. Request 0 draws its tokens 2..8 at 8.5, 13, 13.5 .. 15.5 s."""
    engine = ScriptedEngine()
    result = measure(engine, OfflineWorkload(10, 8, 3, 3), clock=engine.clock)
    assert result.prefill_tok_s == 30 / 13.0
    assert result.decode_tok_s == 3 / 0.5
    assert result.ttft_ms == pytest.approx(1000 * (4 + 8.5 + 13) / 3)
    assert result.ttft_ms_max == 13_000
    last = [13 + 0.5 * 5, 13 + 0.5 * 6, 13 + 0.5 * 7]
    first = [4, 8.5, 13]
    assert result.tpot_ms == pytest.approx(sum(1000 * (b - a) / 7 for a, b in zip(first, last, strict=True)) / 3)
    assert result.tpot_ms_max == pytest.approx(1000 * (15.5 - 4) / 7)
    assert result.elapsed_s == 16.5


def test_requests_are_replaced_when_they_end() -> None:
    engine = ScriptedEngine()
    result = measure(engine, OfflineWorkload(10, 3, 1, 4), clock=engine.clock)
    assert len(engine.prompts) == 4
    assert result.elapsed_s == 4 * 5.0
    assert result.prefill_tok_s == 10 / 4.0
    assert result.ttft_ms == 4000.0


def test_decode_speed_when_the_wave_never_decodes_together() -> None:
    """With 2 tokens each, every request ends in the step after its first token; only the last one decodes alone."""
    engine = ScriptedEngine()
    result = measure(engine, OfflineWorkload(10, 2, 3, 3), clock=engine.clock)
    assert result.decode_tok_s == 1 / 0.5


def test_one_token_each_has_no_decode_speed() -> None:
    engine = ScriptedEngine()
    result = measure(engine, OfflineWorkload(10, 1, 2, 2), clock=engine.clock)
    assert (result.decode_tok_s, result.tpot_ms, result.tpot_ms_max) == (None, None, None)
    assert result.prefill_tok_s == 20 / 8.0


def test_prompts_are_random_ordinary_ids_and_repeatable() -> None:
    engines = [ScriptedEngine(), ScriptedEngine(), ScriptedEngine()]
    for engine, seed in zip(engines, (1, 1, 2), strict=True):
        measure(engine, OfflineWorkload(500, 1, 2, 2, seed=seed), clock=engine.clock)
    assert engines[0].prompts == engines[1].prompts != engines[2].prompts
    assert engines[0].prompts[0] != engines[0].prompts[1]
    assert {i for p in engines[0].prompts for i in p} == set(range(20)) - {0, 1, 2, 9}


def test_a_failed_request_ends_the_measurement() -> None:
    engine = ScriptedEngine()
    engine.fails = True
    with pytest.raises(AbyssalError, match="request 0 failed: NaN"):
        measure(engine, OfflineWorkload(10, 2, 1, 1), clock=engine.clock)
