"""Faults that other engines have had in public, each with a small input of its own and the right value.

The numbers are those of the design notes. Where each is tested:

     1  one activation scale for a whole batch            here
     2  products by another kernel for few rows            here
     3  draft noise reused in the residual draw            here; tests/runner/test_verify.py
     4  ties at the k-th token                             tests/runner/test_sampler.py
     5  noise keyed by rank                                tests/runner/test_sampler.py, tests/core/test_noise.py
     6  infinite noise lifts a masked token                tests/runner/test_sampler.py
     7  a neighbour's drafts move a seeded request         here
     8  seeds without effect under drafts                  here; tests/runner/test_sampler.py
     9  equal outputs of one seeded request                here
    10  lengths around a cache block, cold and warm        here
    11  reasoning that ends inside an accepted run         tests/structured/test_structured_faults.py
    12  a constrained request without drafts               tests/structured/test_structured_faults.py
    13  illegal drafts accepted                            here; tests/structured/test_structured_faults.py
    14  a stop id in the middle of an object               tests/engine/test_structured_engine.py and there
    15  an EOS that only one file names                    here; tests/structured/test_structured_faults.py
    16  min_tokens empties the mask                        tests/engine/test_structured_engine.py, tests/runner/test_sampler.py
    17  keywords that are ignored in silence               tests/structured/test_structured_faults.py
    18  endless and mandatory white space                  tests/structured/test_structured_faults.py
    19  a mask narrower than the logits                    tests/runner/test_sampler.py and there
    20  bounded repetitions, endless compilation           here; tests/structured/test_structured_faults.py
    21  calls behind one newline, calls as text            tests/structured/test_structured_faults.py
    22  penalties count steps                              tests/runner/test_sampler.py
    23  stop strings fire inside reasoning                 here
    24  a finished matcher is advanced                     tests/structured/test_structured_faults.py, tests/runner/test_constraints.py
    25  a row's bits depend on the number of rows          here; tests/engine/test_invariance.py
    26  the order of sums over experts                     here
"""  # noqa: E501

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from collections import Counter

import pytest
import torch

from abyssal.backends.cpu import native
from abyssal.backends.cpu.table import cpu_table, torch_table
from abyssal.config.engine import EngineConfig
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.engine import Engine
from abyssal.ops.moe import StoredExpert
from abyssal.quant.convert import encode_fp8_tiles
from abyssal.quant.formats import StoredMatrix
from abyssal.runner.drafting import Drafts
from abyssal.runner.logit_rules import TokenRoles
from abyssal.runner.sampler import Sampler, SamplingRow
from abyssal.runner.verify import RejectionAcceptance, Verification
from abyssal.structured.spec import StructuredOutput
from abyssal.text.chat import ChatTemplate

SETTINGS = {"num_threads": 1, "max_num_seqs": 8, "num_blocks": 32, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module", params=["native", "torch"])
def table(request):
    if request.param == "native" and native.load() is None:
        pytest.skip("no native library was built")
    torch.set_num_threads(1)
    return cpu_table(request.param, 1)


@pytest.fixture(scope="module")
def engine(checkpoint_of) -> Engine:
    return Engine(checkpoint_of("micro"), EngineConfig(**SETTINGS))


@pytest.fixture(scope="module")
def drafting(checkpoint_of) -> Engine:
    return Engine(checkpoint_of("micro"), EngineConfig(speculation=3, **SETTINGS))


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(values: torch.Tensor) -> StoredMatrix:
    return StoredMatrix("w", "f32", values, None, *values.shape)


def expert_of(width: int, inner: int, seed: int, scale: float = 0.2) -> StoredExpert:
    return StoredExpert(*(plain(rand(*shape, seed=seed + i) * scale) for i, shape in
                          enumerate(((inner, width), (inner, width), (width, inner)))))  # fmt: skip


def finish(engine: Engine) -> dict:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


def outcome(output) -> list[tuple]:
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs]


def test_1_scales_belong_to_a_token(table) -> None:
    """Token A of norm 1 alone, and beside B of norm 1000."""
    experts = [expert_of(64, 32, 10 * i) for i in range(3)]
    held = table.prepare_experts(experts[:2], experts[2], "decoded")
    a, b = rand(1, 64, seed=1), rand(1, 64, seed=2)
    both = torch.cat((b * 1000 / b.norm(), a / a.norm()))
    ids, weights = torch.tensor([[0, 1]] * 2, dtype=torch.int32), torch.full((2, 2), 0.5)
    alone = table.experts(both[1:].contiguous(), ids[1:], weights[1:], held, 1e9, True)
    assert torch.equal(table.experts(both, ids, weights, held, 1e9, True)[1:], alone)
    assert alone.abs().max() > 1e-3


def test_2_the_number_of_rows_picks_no_kernel(table) -> None:
    """Row 0 of M = 1, 15, 16, 31, 32, 33, 128 rows times an FP8 matrix."""
    data, scale = encode_fp8_tiles(rand(64, 256, seed=3) * 0.1)
    stored = StoredMatrix("w", "fp8_tiles", data.view(torch.uint8), scale, 64, 256)
    for held_as in ("decoded", "packed"):
        weight, x = table.prepare_linear([stored], held_as), rand(128, 256)
        first = [table.linear(x[:count].contiguous(), weight)[0] for count in (1, 15, 16, 31, 32, 33, 128)]
        assert all(torch.equal(row, first[0]) for row in first)


def test_3_noise_of_drafts_is_not_that_of_the_residual(table) -> None:
    """q = (.1, .6, .3), p = (.3, .3, .4): the first token is distributed as q."""
    target, proposed = torch.tensor([[0.1, 0.6, 0.3]]).log(), torch.tensor([[0.3, 0.3, 0.4]]).log()
    rule, count = RejectionAcceptance(Sampler(table, TokenRoles(3))), 4000
    params, drawn = SamplingParams(), Counter()
    for seed in range(count):
        (draft,) = rule.draft(proposed, [0], [SamplingRow(params, seed, 5)], 0)
        logits = torch.cat((target, target))
        (tokens,) = rule.verify(logits, [Verification(0, 0, (draft,), params, seed, 5)])
        drawn[tokens[0].token_id] += 1
    statistic = sum((drawn[v] - count * q) ** 2 / (count * q) for v, q in enumerate((0.1, 0.6, 0.3)))
    assert statistic < 18.4  # chi-square with two degrees of freedom, one in ten thousand


def test_7_drafts_of_a_neighbour_move_nothing(checkpoint_of, engine) -> None:
    """A seeded request beside one that has drafts while it has none."""
    mixed = Engine(checkpoint_of("micro"), EngineConfig(speculation=3, **SETTINGS))
    mixed.set_draft_oracle(lambda request, drafts: drafts if request.request_id == "other" else Drafts([], []))
    results = []
    for own in (engine, mixed):
        own.add([5, 6, 7], SamplingParams(seed=3, max_tokens=20, logprobs=0), request_id="seeded")
        own.add([8, 9], SamplingParams(seed=4, max_tokens=20, logprobs=0), request_id="other")
        results.append(outcome(finish(own)["seeded"]))
    assert results[0] == results[1]


def test_8_seeds_decide_under_drafts(drafting) -> None:
    """Seeds 1, 1, 2 at temperature 1, 32 tokens."""
    ids = [drafting.add([5, 6, 7], SamplingParams(seed=seed, max_tokens=32, ignore_eos=True)) for seed in (1, 1, 2)]
    done = finish(drafting)
    first, again, other = (done[i].outputs[0].token_ids for i in ids)
    assert first == again != other


def test_9_outputs_of_a_seeded_request_differ(engine, drafting) -> None:
    """n = 4, seed 5: four different outputs, the same four on every run, with drafts or without."""
    runs = []
    for own in (engine, engine, drafting):
        own.add([5, 6, 7], SamplingParams(n=4, seed=5, max_tokens=16, ignore_eos=True))
        (output,) = finish(own).values()
        runs.append([completion.token_ids for completion in output.outputs])
    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(ids) for ids in runs[0]}) == 4


@pytest.mark.parametrize("length", [127, 128, 129, 256])
def test_10_lengths_around_a_block(checkpoint_of, engine, length: int) -> None:
    """Prompts of B - 1, B, B + 1, 2B tokens: in new caches, and in blocks that others have used."""
    prompt, params = [11 + i % 300 for i in range(length)], SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    fresh = Engine(checkpoint_of("micro"), EngineConfig(**SETTINGS), shuffle_seed=length)
    fresh.fill_caches(math.nan)
    results = []
    for own in (fresh, fresh, engine):
        own.add(prompt, params)
        (output,) = finish(own).values()
        results.append(outcome(output))
    assert results[0] == results[1] == results[2]


def test_13_illegal_drafts_are_not_accepted(checkpoint_of) -> None:
    """Expression ab*c, drafts a z c, scheduled ahead: no z comes out, and one draft at most is kept a step."""
    engine = Engine(checkpoint_of("micro"), EngineConfig(speculation=3, overlap=True, **SETTINGS))
    by_text = {engine.tokenizer.token_bytes(i): i for i in range(engine.tokenizer.vocab_size)}
    wrong = [by_text[c] for c in (b"a", b"z", b"c")]
    engine.set_draft_oracle(lambda request, drafts: Drafts(wrong[: len(drafts.token_ids)], drafts.confidence))
    for seed in range(4):
        engine.add("x", SamplingParams(seed=seed, max_tokens=30), structured=StructuredOutput(regex="ab*c"))
    for output in finish(engine).values():
        completion = output.outputs[0]
        assert re.fullmatch("ab*c", completion.text) or (completion.finish_reason, completion.text) == (
            "length",
            "a" + 29 * "b",
        )


def test_15_an_eos_that_only_one_file_names(checkpoint_of, tmp_path) -> None:
    """The expression ok ends after two or three tokens, whichever of the EOS ids the model prefers."""
    folder = shutil.copytree(checkpoint_of("micro"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    engine = Engine(folder, EngineConfig(**SETTINGS))
    for eos in (2, config["eos_token_id"]):
        params = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={eos: 50.0})
        engine.add("x", params, structured=StructuredOutput(regex="ok"))
        (output,) = finish(engine).values()
        completion = output.outputs[0]
        assert (completion.text, completion.finish_reason, completion.token_ids[-1]) == ("ok", "stop", eos)
        assert len(completion.token_ids) <= 3


def test_20_compilation_without_an_end(engine, monkeypatch) -> None:
    """A grammar that is still being compiled at its time limit fails its request, and the engine goes on."""
    engine.constrained.check(StructuredOutput(regex="a"))
    compiler, blocked = engine.constrained.compiler, threading.Event()
    real = compiler._compile

    def compile_slowly(spec):
        if spec.kind == "regex":
            blocked.wait(30)
        return real(spec)

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    monkeypatch.setattr(compiler, "_time_limit_s", 0.2)
    bad = engine.add("x", SamplingParams(), structured=StructuredOutput(regex="q{7}"))
    good = engine.add("x", SamplingParams(seed=0), structured=StructuredOutput(choice=["fine"]))
    done = finish(engine)
    blocked.set()
    assert "takes more than 0.2 s to compile" in done[bad].error
    assert done[good].outputs[0].text == "fine"


@pytest.mark.parametrize("include", [False, True])
def test_23_stop_strings_inside_reasoning(engine, include: bool) -> None:
    """stop "Question:", which the reasoning holds: the answer arrives all the same, and ends at the next one."""
    tokenizer = engine.tokenizer
    prompt = ChatTemplate(tokenizer).render([{"role": "user", "content": "x"}], thinking=True)
    parser = prompt.parser(SamplingParams(stop=("Question:",), include_stop_str_in_output=include))
    for token_id in tokenizer.encode("A Question: Quest</think>Fine. Question: more", add_bos=False):
        parser.push(token_id)
        if parser.stop_string:
            break
    parser.finish()
    assert parser.reasoning == "A Question: Quest"
    assert parser.text == ("Fine. Question:" if include else "Fine. ")
    assert parser.stop_string == "Question:"


def test_25_rows_and_their_number() -> None:
    """float32 products of M rows: torch's own kernels vary, the same with fixed tiles does not."""
    weight, x = plain(rand(96, 320, seed=1)), rand(64, 320)

    def varies(table) -> bool:
        matrix = table.prepare_linear([weight], "decoded")
        whole = table.linear(x, matrix)
        parts = (torch.equal(table.linear(x[i : i + m].contiguous(), matrix), whole[i : i + m])
                 for m in (1, 2, 3, 5, 7, 8, 9, 17, 33) for i in (0, 11))  # fmt: skip
        return not all(parts)

    assert varies(torch_table())
    assert not varies(torch_table(invariant=True))
    if native.load() is not None:
        assert not varies(cpu_table("native", 1))


def test_26_sums_over_experts_have_an_order(table) -> None:
    """Contributions of about 1e8, 1, -1e8, 1 are added in the order of the slots, for one row and for 4096."""
    width, experts = 32, [expert_of(32, 32, 10 * i, 1.0) for i in range(4)]
    nothing = StoredExpert(*(plain(torch.zeros(32, 32)) for _ in range(3)))
    held = table.prepare_experts(experts, nothing, "decoded")
    x, weights = rand(1, width, seed=9), torch.tensor([[1e8, 1.0, -1e8, 1.0]])
    ids = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    own = [table.experts(x, ids[:, k : k + 1].contiguous(), weights[:, k : k + 1].contiguous(), held, 1e9, False)
           for k in range(4)]  # fmt: skip
    expected = ((own[0] + own[1]) + own[2]) + own[3]
    one = table.experts(x, ids, weights, held, 1e9, False)
    assert torch.equal(one, expected)
    assert not torch.equal(one, ((own[3] + own[2]) + own[1]) + own[0])
    many = table.experts(x.repeat(4096, 1), ids.repeat(4096, 1), weights.repeat(4096, 1), held, 1e9, False)
    assert torch.equal(many, expected.repeat(4096, 1))
