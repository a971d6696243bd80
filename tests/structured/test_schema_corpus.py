"""Random schemas: what a random model writes under each accepted one has to satisfy it, by the jsonschema library."""

from collections import Counter

import pytest

CHUNKS, SEEDS_PER_CHUNK = 8, 320


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_everything_written_under_an_accepted_schema_is_valid(chunk: int, kit, corpus, record_property) -> None:
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        corpus.check_seed(seed, kit.compiler, kit.vocabulary, counts, problems)
    for name, count in counts.items():
        record_property(name, count)
    assert problems == []
    assert (counts["invalid"], counts["stuck"], counts["probe invalid accepted"]) == (0, 0, 0)
    assert counts["refused with a path"] == counts["refused"]
    # The corpus would prove little if most were refused, nothing finished, or no probe was invalid.
    assert counts["accepted"] > 0.55 * SEEDS_PER_CHUNK
    assert counts["valid"] > 0.95 * counts["accepted"]
    assert min(counts["probe invalid rejected"], counts["probe valid accepted"]) > 50


def test_a_matcher_that_is_too_lenient_would_be_found(kit, corpus) -> None:
    """The check itself: a grammar of another schema in the place of the right one is noticed."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    model = corpus.RandomModel(kit.vocabulary, 3)
    verdicts = set()
    for _ in range(20):
        outcome, written = corpus.write(
            kit.matcher(json={**schema, "properties": {"a": {"type": ["integer", "string"]}}}), model
        )
        verdicts.add(outcome == "done" and corpus.is_valid(schema, kit.text(written)))
    assert False in verdicts


@pytest.mark.parametrize(
    ("schema", "text", "valid"),
    [
        ({"multipleOf": 0.01}, "19.99", True),
        ({"multipleOf": 0.01}, "19.995", False),
        ({"multipleOf": 3}, "1e99999", False),
        ({"exclusiveMaximum": 10}, "9.99999999999999999999999", True),
        ({"format": "date"}, '"2023-02-29"', False),
        ({"format": "time"}, '"12:00:00Z"', True),
        ({"format": "duration"}, '"P1D"', True),
        ({"format": "duration"}, '"PD"', False),
        ({"format": "hostname"}, '"a-.b"', False),
    ],
)
def test_the_judge_is_right_where_the_library_alone_would_not_be(corpus, schema: dict, text: str, valid: bool) -> None:
    assert corpus.is_valid(schema, text) is valid
