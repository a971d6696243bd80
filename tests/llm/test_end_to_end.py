"""LLM on the `micro` checkpoint."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from abyssal import LLM, SamplingParams
from abyssal.core.errors import CheckpointError, InvalidRequest
from abyssal.text.chat import ChatTemplate

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def micro(checkpoint_of) -> Path:
    return checkpoint_of("micro")


@pytest.fixture(scope="module")
def llm(micro: Path) -> Iterator[LLM]:
    with LLM(micro, numerics="exact") as llm:
        yield llm


def prompt_of(golden: dict[str, torch.Tensor]) -> list[int]:
    return golden["input_ids"][: int(golden["greedy_prompt_len"])].tolist()


def test_greedy_continuation_is_the_golden_one(llm: LLM, golden_of) -> None:
    golden = golden_of("micro")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    output = llm.generate(prompt_of(golden), params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == golden["exact.greedy_ids"].tolist()
    assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids)
    assert output.outputs[0].finish_reason == "length"


def test_scores_are_the_golden_logits(llm: LLM, golden_of) -> None:
    golden = golden_of("micro")
    logits = llm.score(golden["input_ids"].tolist(), chunk=50)
    expected = golden["exact.logits"]
    assert ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5


def test_bad_prompts_alone_fail(llm: LLM, golden_of) -> None:
    good = prompt_of(golden_of("micro"))
    alone = llm.generate(good, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    vocab_size = llm.engine.model_config.text.vocab_size
    bad = [
        [],
        "",
        [1, vocab_size],
        [-1],
        [True],
        ["1"],
        [1.5],
        [5] * (llm.engine.max_model_len + 1),
        {"prompt": 1},
        None,
        "\ud800",
    ]
    outputs = llm.generate([good, *bad, good], GREEDY, use_tqdm=False)
    assert [o.error is not None for o in outputs] == [False, *[True] * len(bad), False]
    assert {o.outputs[0].finish_reason for o in outputs[1:-1]} == {"error"}
    assert outputs[0].outputs[0].token_ids == outputs[-1].outputs[0].token_ids == alone


def test_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    whole = llm.generate("The cat", GREEDY, use_tqdm=False)[0].outputs[0]
    texts = [output.outputs[0].text for output in llm.stream("The cat", GREEDY)]
    assert texts[-1] == whole.text
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)


def test_stop_string_cuts_the_text(llm: LLM) -> None:
    whole = llm.generate("The cat", GREEDY, use_tqdm=False)[0].outputs[0]
    assert whole.finish_reason == "length"
    stop = whole.text[5:8]
    expected = whole.text[: whole.text.index(stop)]
    cut = llm.generate("The cat", SamplingParams(temperature=0.0, max_tokens=24, stop=stop), use_tqdm=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (expected, "stop", stop)
    assert len(cut.token_ids) < 24
    kept = SamplingParams(temperature=0.0, max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert llm.generate("The cat", kept, use_tqdm=False)[0].outputs[0].text == expected + stop


def test_chat_prompt_and_answer(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    output = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids == ChatTemplate(llm.get_tokenizer()).render(messages).token_ids
    assert output.outputs[0].reasoning is None
    ids = output.outputs[0].token_ids
    assert len(ids) == 24
    assert list(llm.stream_chat(messages, GREEDY))[-1].outputs[0].text == output.outputs[0].text
    thinking = llm.chat(messages, GREEDY, thinking=True, use_tqdm=False)[0].outputs[0]
    assert thinking.reasoning


def test_many_more_prompts_than_the_engine_holds(micro: Path) -> None:
    with LLM(micro, max_num_seqs=4, seed=1) as llm:
        prompts = [[11 + i % 50] * (1 + i % 9) for i in range(60)]
        params = [SamplingParams(temperature=1.0, max_tokens=1 + i % 5, seed=i, ignore_eos=True) for i in range(60)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [o.prompt_token_ids for o in outputs] == prompts
        assert [len(o.outputs[0].token_ids) for o in outputs] == [1 + i % 5 for i in range(60)]
        some = llm.generate(prompts[17], params[17], use_tqdm=False)[0]
        assert some.outputs[0].token_ids == outputs[17].outputs[0].token_ids


def without_tokenizer(checkpoint: Path, folder: Path) -> Path:
    for file in checkpoint.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    return folder


def test_checkpoint_without_a_tokenizer_is_refused(micro: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        LLM(without_tokenizer(micro, tmp_path))


def test_dummy_model_without_a_tokenizer_takes_ids(micro: Path, tmp_path: Path) -> None:
    with LLM(without_tokenizer(micro, tmp_path), load_format="dummy") as llm:
        ids, text = llm.generate([[5, 6, 7], "text"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert (len(ids.outputs[0].token_ids), ids.outputs[0].text, ids.error) == (3, "", None)
        assert "no tokenizer" in text.error
        assert "need a tokenizer" in llm.generate([5], SamplingParams(stop="x"), use_tqdm=False)[0].error
        with pytest.raises(InvalidRequest, match="tokenizer"):
            llm.get_tokenizer()
