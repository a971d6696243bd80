"""Jobs against a scripted engine: order, bounds, files, and what may be gone on with."""

import itertools
import json
import random
from pathlib import Path

import pytest
from scripted import ScriptedEngine, text_of

from abyssal.batch import BatchJob
from abyssal.batch import job as job_module
from abyssal.batch import sink as sink_module
from abyssal.batch.answers import AnswerFile
from abyssal.core.errors import ConfigError


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that answers of two jobs can be compared byte by byte."""
    monkeypatch.setattr(job_module.time, "time", lambda: 1_800_000_000.5)


@pytest.fixture
def mixed(completion, chat) -> list[str]:
    """Lines of every kind, of different lengths."""
    rng = random.Random(5)
    lines = []
    for number in range(60):
        length = rng.choice([1, 2, 5, 20])
        kind = rng.randrange(6)
        if kind < 3:
            lines.append(completion(f"c{number}", f"prompt {number}", max_tokens=length))
        elif kind == 3:
            lines.append(chat(f"c{number}", f"prompt {number}", max_tokens=length, logprobs=True))
        elif kind == 4:
            lines.append(completion(f"c{number}", [f"p {number}", "q"], max_tokens=length))
        else:
            lines.append(
                rng.choice(["{", completion("c0"), completion(f"c{number}", "fails!"), completion(f"c{number}", x=1)])
            )
    return lines


def line_numbers(records: list[dict]) -> list[int]:
    return [int(record["id"][len("batch_req_") :][:10], 16) for record in records]


def test_every_line_is_answered_by_its_own_tokens(job, completion) -> None:
    lengths = {f"n{i}": 1 + i * 7 % 11 for i in range(40)}
    progress = job.write([completion(n, f"prompt {n}", seed=9, max_tokens=k) for n, k in lengths.items()]).run()
    texts = {name: record["response"]["body"]["choices"][0]["text"] for name, record in job.by_id().items()}
    assert texts == {name: text_of(f"prompt {name}", 9, length) for name, length in lengths.items()}
    assert (progress.total, progress.done, progress.failed, progress.resumed) == (40, 40, 0, 0)
    assert progress.is_complete
    assert progress.tokens_out == sum(lengths.values())
    assert progress.tokens_in == sum(1 + len(f"prompt {name}") for name in lengths)


def test_answers_come_as_they_finish_or_in_order(new_job, mixed) -> None:
    free, ordered = new_job("free").write(mixed), new_job("ordered").write(mixed)
    free.run()
    ordered.run(ordered=True)
    assert line_numbers(ordered.records()) == list(range(1, len(mixed) + 1))
    assert sorted(line_numbers(free.records())) == list(range(1, len(mixed) + 1))
    assert line_numbers(free.records()) != list(range(1, len(mixed) + 1))
    assert sorted(free.output.read_bytes().splitlines()) == ordered.output.read_bytes().splitlines()


def test_order_does_not_read_ahead_without_bound(job, completion) -> None:
    """A line that takes long holds up what is written, not more than a window of what is read."""
    engine = ScriptedEngine(max_num_seqs=2)
    lines = [completion("slow", max_tokens=300), *(completion(f"n{i}", max_tokens=1) for i in range(500))]
    seen = []

    def stop() -> bool:
        seen.append(len(engine.params))
        return False

    job.write(lines).run(engine, ordered=True, stop=stop)
    while_slow = [count for count in seen if "batch-1-0" in engine.params][:300]
    assert max(while_slow) <= 16 * 2
    assert line_numbers(job.records()) == list(range(1, 502))


def test_the_engine_is_never_given_more_than_it_has_room_for(job, completion) -> None:
    engine = ScriptedEngine(max_num_seqs=3)
    job.write([completion("many", ["x"] * 500, max_tokens=1), *(completion(str(i)) for i in range(50))]).run(engine)
    assert engine.most_unfinished == 6
    assert len(job.by_id()["many"]["response"]["body"]["choices"]) == 500


def test_errors_in_a_file_of_their_own(job, mixed) -> None:
    job.write(mixed).run(error_path=job.errors)
    errors = job.records(job.errors)
    assert errors
    assert all(record["error"] is not None for record in errors)
    assert all(record["error"] is None for record in job.records())
    assert sorted(line_numbers(errors + job.records())) == list(range(1, len(mixed) + 1))


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"error_path": "errors.jsonl"}])
def test_a_job_that_was_stopped_anywhere_ends_as_an_uninterrupted_one(new_job, mixed, options: dict) -> None:
    def run(job, **more):
        named = {"error_path": job.folder / options["error_path"]} if "error_path" in options else options
        return job.run(ScriptedEngine(max_num_seqs=2), **named, **more)

    def content(job) -> list[bytes]:
        files = [job.output, job.errors] if "error_path" in options else [job.output]
        return [b"".join(sorted(file.read_bytes().splitlines(keepends=True))) for file in files]

    whole = new_job("whole").write(mixed)
    run(whole)
    for stopped_at in range(0, 400, 7):
        job = new_job(f"stopped at {stopped_at}").write(mixed)
        asked = itertools.chain(itertools.repeat(False, stopped_at), itertools.repeat(True))
        first = run(job, stop=lambda asked=asked: next(asked))
        before = job.output.read_bytes()
        second = run(job)
        assert second.resumed == first.done
        assert second.is_complete
        assert job.output.read_bytes().startswith(before)
        assert content(job) == content(whole)
        if options.get("ordered"):
            assert job.output.read_bytes() == whole.output.read_bytes()


def test_stop_finishes_what_runs_and_begins_nothing(job, completion) -> None:
    engine = ScriptedEngine(max_num_seqs=3)
    lines = [completion(f"n{i}", max_tokens=10) for i in range(50)]
    progress = job.write(lines).run(engine, stop=lambda: len(engine.begun) >= 3)
    assert sorted(job.by_id()) == ["n0", "n1", "n2"]
    assert engine.begun == ["batch-1-0", "batch-2-0", "batch-3-0"]
    assert not engine.has_unfinished
    assert (progress.done, progress.is_stopping, progress.is_complete) == (3, True, False)


def test_stop_finishes_prompts_that_are_being_read(job, completion) -> None:
    """What runs is not only what has given a token."""
    engine = ScriptedEngine(max_num_seqs=3, prefill_steps=5)
    lines = [completion(f"n{i}", max_tokens=2) for i in range(50)]
    job.write(lines).run(engine, stop=lambda: len(engine.begun) >= 3)
    assert sorted(job.by_id()) == ["n0", "n1", "n2"]
    assert engine.begun == ["batch-1-0", "batch-2-0", "batch-3-0"]


def test_a_line_of_many_prompts_that_has_begun_is_finished(job, completion) -> None:
    engine = ScriptedEngine(max_num_seqs=3)
    job.write([completion("a", ["x"] * 40, max_tokens=2), completion("b")])
    job.run(engine, stop=lambda: len(engine.begun) >= 2)
    assert list(job.by_id()) == ["a"]


def test_an_answered_line_is_never_computed_again(job, completion) -> None:
    lines = [completion(f"n{i}") for i in range(20)]
    job.write(lines).run()
    content = job.output.read_bytes()
    engine = ScriptedEngine()
    progress = job.run(engine)
    assert engine.params == {}
    assert (progress.done, progress.resumed, progress.tokens_out) == (20, 20, 0)
    assert job.output.read_bytes() == content


def test_an_empty_input_has_an_empty_output(job) -> None:
    progress = job.write([]).run()
    assert (progress.total, progress.is_complete, progress.eta) == (0, True, None)
    assert job.records() == []


DIFFERENT = [
    ({"ordered": True}, {}, "ordered: False then, True now"),
    ({"error_path": "e"}, {}, "error_file: None then, "),
    ({"model_name": "other"}, {}, "model: 'toy' then, 'other' now"),
    ({}, {"numerics": "exact"}, "numerics: 'released' then, 'exact' now"),
    ({}, {"seed": 5}, "seed: 0 then, 5 now"),
    ({}, {"max_model_len": 64}, "max_model_len: None then, 64 now"),
    ({}, {"speculation": 2, "acceptance": "rejection"}, "speculation: 'lossless' then, 'rejection, 2' now"),
]


@pytest.mark.parametrize(("options", "settings", "reason"), DIFFERENT)
def test_another_job_does_not_go_on_with_the_output(job, completion, options, settings, reason) -> None:
    job.write([completion("a"), completion("b")]).run(stop=lambda: job.output.exists() and job.output.stat().st_size > 0)
    content, journal = job.output.read_bytes(), job.journal.read_bytes()
    if "error_path" in options:
        options = {"error_path": job.errors}
    with pytest.raises(ConfigError, match="was begun as another job") as caught:
        job.run(ScriptedEngine(**settings), **options)
    assert reason in str(caught.value)
    assert "--restart" in str(caught.value)
    assert (job.output.read_bytes(), job.journal.read_bytes()) == (content, journal)
    assert job.run(ScriptedEngine(**settings), **options, restart=True).resumed == 0
    assert sorted(job.by_id()) == ["a", "b"]


def test_another_input_does_not_go_on_with_the_output(job, completion) -> None:
    job.write([completion("a"), completion("b")]).run()
    job.write([completion("a"), completion("B")])
    with pytest.raises(ConfigError, match="input_sha256"):
        job.run()
    assert job.run(restart=True).done == 2
    assert sorted(job.by_id()) == ["B", "a"]


def test_another_model_of_the_same_name_does_not_go_on(job, completion, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(9000))
    job.write([completion("a")]).run(ScriptedEngine(folder=folder))
    (folder / "model.safetensors").write_bytes(bytes(4400) + b"\1" * 200 + bytes(4400))
    with pytest.raises(ConfigError, match="model_files"):
        job.run(ScriptedEngine(folder=folder))


@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 1}, {"weights": "packed"}, {"num_threads": 3}, {"seed": 0}, {"speculation": 3}]
)
def test_settings_that_change_no_token_may_change(job, completion, settings) -> None:
    job.write([completion("a")]).run()
    assert job.run(ScriptedEngine(**settings)).resumed == 1


def test_facts_known_early_refuse_early(job, completion) -> None:
    job.write([completion("a")]).run()
    with pytest.raises(ConfigError, match="numerics: 'released' then, 'exact' now"):
        BatchJob(job.input, job.output, model_name="toy", facts={"numerics": "exact"})
    with BatchJob(job.input, job.output, model_name="toy", facts={"numerics": "released", "unheard_of": 1}) as opened:
        assert opened.is_complete
        assert (opened.num_answered, opened.num_failed) == (1, 0)


def test_what_is_not_ours_is_not_overwritten(job, completion) -> None:
    job.write([completion("a")])
    job.output.write_text("notes\n")
    with pytest.raises(ConfigError, match=r"out\.jsonl is not empty, and no journal"):
        job.run()
    assert job.output.read_text() == "notes\n"
    job.output.write_text("")
    job.errors.write_text("notes\n")
    with pytest.raises(ConfigError, match=r"errors\.jsonl is not empty"):
        job.run(error_path=job.errors)
    assert job.errors.read_text() == "notes\n"
    job.run(error_path=job.errors, restart=True)
    assert (len(job.records()), job.errors.read_text()) == (1, "")


@pytest.mark.parametrize("content", ["", "{}", '{"format": "abyssal batch 0"}', "[]", "{"])
def test_a_damaged_journal_is_refused(job, completion, content: str) -> None:
    job.write([completion("a")]).run()
    job.journal.write_text(content)
    with pytest.raises(ConfigError, match=r"out\.jsonl\.journal"):
        job.run()


def test_a_line_answered_twice_is_refused(job, completion) -> None:
    job.write([completion("a")]).run()
    job.output.write_bytes(job.output.read_bytes() * 2)
    with pytest.raises(ConfigError, match="line 1 of the input is answered twice"):
        job.run()


def test_an_output_without_answers_belongs_to_whoever_comes(job, completion) -> None:
    job.write([completion("a")]).run(stop=lambda: True)
    assert job.journal.exists()
    job.write([completion("b")]).run(ScriptedEngine(numerics="exact"))
    assert list(job.by_id()) == ["b"]
    assert json.loads(job.journal.read_text())["facts"]["numerics"] == "exact"


def test_a_file_cannot_serve_twice(job, completion) -> None:
    job.write([completion("a")])
    content = job.input.read_bytes()
    job.output.symlink_to(job.input)
    for options in ({}, {"error_path": job.input}, {"error_path": job.journal}):
        with pytest.raises(ConfigError, match="cannot serve twice"):
            job.run(**options)
    assert job.input.read_bytes() == content


def test_an_engine_with_requests_of_others_is_refused(job, completion) -> None:
    engine = ScriptedEngine()
    from abyssal.core.sampling_params import SamplingParams

    engine.add([5], SamplingParams(), request_id="other")
    with pytest.raises(ConfigError, match="has requests of others"):
        job.write([completion("a")]).run(engine)


def test_an_engine_that_breaks_leaves_what_was_answered(job, completion, monkeypatch) -> None:
    engine = ScriptedEngine(max_num_seqs=2)
    real, steps = engine.step, iter(range(100))

    def step():
        if next(steps) == 7:
            raise RuntimeError("out of memory")
        return real()

    monkeypatch.setattr(engine, "step", step)
    job.write([completion(f"n{i}", max_tokens=2) for i in range(20)])
    with pytest.raises(RuntimeError, match="out of memory"):
        job.run(engine)
    assert len(job.records()) == 6
    assert not engine.has_unfinished
    assert job.run().is_complete


def test_progress_adds_up(job, completion) -> None:
    seen = []
    job.write([completion(f"n{i}", max_tokens=3) for i in range(12)] + ["{", ""])
    job.run(ScriptedEngine(step_seconds=0.02), on_progress=seen.append)
    assert len(seen) >= 3
    for before, after in itertools.pairwise(seen):
        assert before.done <= after.done
        assert before.elapsed <= after.elapsed
    assert all(p.total == 13 and p.running <= 4 and p.waiting <= 4 and p.hit_rate is None for p in seen)
    half = next(p for p in seen if 0 < p.done < 13)
    assert half.eta == pytest.approx(half.elapsed * (13 - half.done) / half.done)
    assert (seen[-1].done, seen[-1].failed, seen[-1].eta) == (13, 1, 0.0)


def test_what_is_written_is_synced_now_and_then_and_at_the_end(job, completion, syncs, monkeypatch) -> None:
    monkeypatch.setattr(sink_module, "SYNC_SECONDS", 0.0)
    counts = []
    job.write([completion(f"n{i}", max_tokens=2) for i in range(40)])
    job.run(on_progress=lambda progress: counts.append((progress.done, len(syncs))))
    before_first, at_the_end = counts[0][1], counts[-1][1]
    assert before_first >= 2, "the journal and its folder are not synced before the first answer"
    assert at_the_end > before_first
    assert len(syncs) > at_the_end


def test_a_disk_that_cannot_sync_ends_the_job(job, completion, monkeypatch) -> None:
    monkeypatch.setattr(sink_module, "SYNC_SECONDS", 0.0)
    job.write([completion(f"n{i}", max_tokens=2) for i in range(400)])

    def fail(file: AnswerFile) -> None:
        raise OSError(5, "Input/output error", str(file.path))

    monkeypatch.setattr(AnswerFile, "sync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        job.run(ScriptedEngine(step_seconds=0.001))
