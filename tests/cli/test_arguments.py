import argparse
from dataclasses import fields

import pytest

from abyssal.cli import arguments
from abyssal.config.engine import EngineConfig
from abyssal.core.sampling_params import SamplingParams


def parse(cls: type, line: str, **options: object) -> dict:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add = arguments.add_engine if cls is EngineConfig else arguments.add_sampling
    add(parser, **options)
    return arguments.given(parser.parse_args(line.split()), cls)


def test_nothing_given_is_nothing_set() -> None:
    assert parse(SamplingParams, "") == {}
    assert parse(EngineConfig, "") == {}


def test_sampling_flags() -> None:
    line = (
        "--temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --max-tokens 7 --min-tokens 2 --stop a --stop b "
        "--stop-token-ids 4 --stop-token-ids 5 --ignore-eos --logprobs 2 --prompt-logprobs 0 --no-skip-special-tokens "
        "--include-stop-str-in-output --detokenize --top-k-top-p joint --presence-penalty 1 --frequency-penalty -0.5 "
        "--repetition-penalty 1.2 --logit-bias 7=-2.5 --logit-bias 9:4 --allowed-token-ids 7 --allowed-token-ids 9 "
        "--bad-words fish --n 2 --thinking-token-budget 50 --logprobs-mode processed"
    )
    values = parse(SamplingParams, line)
    assert set(values) == {f.name for f in fields(SamplingParams)}
    assert SamplingParams(**values) == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        max_tokens=7,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=0,
        detokenize=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        top_k_top_p="joint",
        presence_penalty=1.0,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias=((7, -2.5), (9, 4.0)),
        allowed_token_ids=(7, 9),
        bad_words=("fish",),
        n=2,
        thinking_token_budget=50,
        logprobs_mode="processed",
    )


def test_engine_flags() -> None:
    line = (
        "--numerics window,index --weights packed --engram mmap --load-format dummy --max-model-len 100 --max-num-seqs 3 "
        "--max-num-batched-tokens 9 --num-blocks 12 --cache-bytes 2GiB --num-threads 1 --backend torch --seed 5 "
        "--device cuda --speculation 3 --acceptance rejection --bounded-replay off --no-overlap --no-invariant"
    )
    values = parse(EngineConfig, line)
    assert set(values) == {f.name for f in fields(EngineConfig)}
    assert values["cache_bytes"] == 2 * 2**30
    assert EngineConfig(**values).weights == "packed"


def test_skipped_fields_have_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(EngineConfig, "--seed 5", skip=("seed",))
    assert "unrecognized arguments: --seed 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["--weights both", "--num-threads many", "--temp 1", "--cache-bytes lots", "--top-k 1.5", "--logit-bias 5"]
)
def test_bad_flags_exit_with_2(line: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(EngineConfig if line.startswith(("--weights", "--num", "--cache")) else SamplingParams, line)
    assert caught.value.code == 2


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_every_field_has_help(cls: type) -> None:
    helps = arguments.field_help(cls)
    assert set(helps) == {f.name for f in fields(cls)}
    assert all(helps.values())


def test_help_of_a_field_spans_lines() -> None:
    class Example:
        """Summary.

        Attributes:
            one, two: first line
                second line.
            three: short.

        Raises:
            Nothing: ever.
        """

    assert arguments.field_help(Example) == {
        "one": "first line second line.",
        "two": "first line second line.",
        "three": "short.",
    }


BYTES = {"0": 0, "123": 123, "4GiB": 2**32, "4 gib": 2**32, "500MB": 5 * 10**8, "1.5k": 1500, "2Ti": 2**41, "1e9": 10**9}


@pytest.mark.parametrize(("text", "expected"), BYTES.items())
def test_bytes(text: str, expected: int) -> None:
    assert arguments.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "GiB", "4XB", "1,000", "nan", "4Gi B b"])
def test_bad_bytes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no number of bytes"):
        arguments.parse_bytes(text)
