"""`abyssal logits --drafts` against golden tensors, and what it refuses."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from abyssal.cli.main import main


def run(folder, source, drafts, out, *more):
    common = ["logits", "--model", str(folder), "--numerics", "exact", "--num-threads", "1", "--num-blocks", "8"]
    return main([*common, "--input-ids", str(source), "--drafts", str(drafts), "--out", str(out), *more])


@pytest.mark.parametrize("preset", ["micro", "deep"])
@pytest.mark.parametrize(
    "more", [[], ["--chunk", "11"], ["--decode-from", "120"]], ids=lambda more: " ".join(more) or "whole"
)
def test_golden(checkpoint_of, golden_of, tmp_path, preset, more):
    golden = golden_of(preset)
    save_file(
        {name: golden[name] for name in ("input_ids", "dspark.anchor_positions", "dspark.previous_ids")}, tmp_path / "in"
    )
    assert run(checkpoint_of(preset), tmp_path / "in", tmp_path / "in", tmp_path / "out", *more) == 0
    found = load_file(tmp_path / "out")
    tolerances = {
        "logits": 1e-5,
        "dspark.features_last": 1e-5,
        "dspark.base_logits": 1e-4,
        "dspark.draft_logits": 1e-4,
        "dspark.confidence": 1e-4,
    }
    assert set(found) == set(tolerances)
    for name, tolerance in tolerances.items():
        wanted = golden[f"exact.{name}"]
        assert found[name].shape == wanted.shape
        assert ((found[name] - wanted).norm(dim=-1) <= tolerance * wanted.norm(dim=-1)).all(), name


@pytest.fixture
def micro_ids(tmp_path):
    save_file({"input_ids": torch.arange(20, 40)}, tmp_path / "ids")
    return tmp_path / "ids"


BAD = {
    "anchor": ({"dspark.anchor_positions": [20], "dspark.previous_ids": [[1, 2, 3]]}, "anchor_positions=20"),
    "negative": ({"dspark.anchor_positions": [-1], "dspark.previous_ids": [[1, 2, 3]]}, "anchor_positions=-1"),
    "block": ({"dspark.anchor_positions": [3], "dspark.previous_ids": [[1, 2]]}, r"shape \[1, 2\]"),
    "count": ({"dspark.anchor_positions": [3, 4], "dspark.previous_ids": [[1, 2, 3]]}, r"must have shape \[2, 3\]"),
    "id": ({"dspark.anchor_positions": [3], "dspark.previous_ids": [[1, 2, 5000]]}, "must be token ids"),
    "dimensions": ({"dspark.anchor_positions": [3], "dspark.previous_ids": [1, 2, 3]}, "2 dimensions"),
    "missing": ({"dspark.anchor_positions": [3]}, "previous_ids"),
    "real": ({"dspark.anchor_positions": [3.0], "dspark.previous_ids": [[1, 2, 3]]}, "whole numbers"),
}


@pytest.mark.parametrize(("tensors", "words"), BAD.values(), ids=BAD.keys())
def test_files_that_do_not_fit(checkpoint_of, micro_ids, tmp_path, capsys, tensors, words):
    save_file({name: torch.tensor(value) for name, value in tensors.items()}, tmp_path / "drafts")
    assert run(checkpoint_of("micro"), micro_ids, tmp_path / "drafts", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert pytest.importorskip("re").search(words, error), error
    assert not (tmp_path / "out").exists()


def test_no_file_and_no_drafter(checkpoint_of, micro_ids, tmp_path, capsys):
    assert run(checkpoint_of("micro"), micro_ids, tmp_path / "none", tmp_path / "out") == 2
    assert "does not exist" in capsys.readouterr().err
    save_file(
        {"dspark.anchor_positions": torch.tensor([3]), "dspark.previous_ids": torch.tensor([[1, 2, 3]])}, tmp_path / "d"
    )
    assert run(checkpoint_of("micro"), micro_ids, tmp_path / "d", tmp_path / "out", "--speculation", "off") == 2
    assert "speculation='off'" in capsys.readouterr().err
