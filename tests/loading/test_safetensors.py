"""Reading safetensors: values as the reference library reads them, and every fault told in one error."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from abyssal.config.model import ModelConfig
from abyssal.core.errors import CheckpointError
from abyssal.loading.header import read_header
from abyssal.loading.safetensors import Checkpoint
from abyssal.loading.weights import StoredWeights

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the micro checkpoint to damage."""
    return Path(shutil.copytree(checkpoint_of("micro"), tmp_path / "model"))


def load_shard(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(str(path), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite the checkpoint as one file with its tensors edited."""
    tensors = load_shard(folder / SHARDS[0]) | load_shard(folder / SHARDS[1])
    edit(tensors)
    for name in (*SHARDS, INDEX):
        (folder / name).unlink()
    save_file(tensors, str(folder / "model.safetensors"))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def write_raw(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def failure(folder: Path) -> str:
    """What is said on opening and checking."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder).check(ModelConfig.load(folder))
    return str(caught.value)


def test_every_byte_as_the_reference_library_reads_it(checkpoint_of: Callable[[str], Path]) -> None:
    folder = checkpoint_of("micro")
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(ModelConfig.load(folder))
    expected = load_shard(folder / SHARDS[0]) | load_shard(folder / SHARDS[1])
    assert set(checkpoint.names()) == expected.keys()
    for name, tensor in expected.items():
        got = checkpoint.tensor(name)
        assert got.shape == tensor.shape
        assert got.dtype == (tensor.dtype if tensor.dtype in (torch.bfloat16, torch.float32) else torch.uint8)
        assert raw_bytes(got) == raw_bytes(tensor)
    assert checkpoint.num_bytes == json.loads((folder / INDEX).read_text())["metadata"]["total_size"]


def test_entry_tells_where_the_bytes_are(checkpoint_of: Callable[[str], Path]) -> None:
    folder = checkpoint_of("micro")
    checkpoint = Checkpoint.open(folder)
    entry = checkpoint.spec("layers.1.engram.embed.weight")
    with (folder / entry.shard).open("rb") as file:
        file.seek(entry.offset)
        assert file.read(entry.num_bytes) == raw_bytes(checkpoint.tensor("layers.1.engram.embed.weight"))


def test_tensors_are_views_of_the_file(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    view = checkpoint.tensor("layers.0.attn.wq_a.weight")
    again = checkpoint.tensor("layers.0.attn.wq_a.weight")
    assert view.data_ptr() == again.data_ptr()
    before = raw_bytes(view)
    checkpoint.release()
    assert raw_bytes(view) == before


def test_rows(checkpoint_of: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint.open(checkpoint_of("micro"))
    whole = checkpoint.tensor("layers.4.engram.embed.scale")
    rows = torch.tensor([5, 0, 833, 5])
    assert checkpoint.rows("layers.4.engram.embed.scale").gather(rows[:0]).shape == (0, 1)
    reader = checkpoint.rows("layers.4.engram.embed.scale")
    assert torch.equal(reader.gather(rows), whole[rows])
    assert torch.equal(reader.in_memory().gather(rows), whole[rows])


def test_weights_as_the_model_asks_for_them(checkpoint_of: Callable[[str], Path]) -> None:
    folder = checkpoint_of("micro")
    stored = load_shard(folder / SHARDS[0]) | load_shard(folder / SHARDS[1])
    weights = StoredWeights(Checkpoint.open(folder))
    expert = weights.matrix("layers.0.ffn.experts.0.w2")
    assert (expert.format, expert.out_features, expert.in_features) == ("fp4_rows", 256, 128)
    assert weights.matrix("layers.0.attn.wkv").format == "fp8_tiles"
    assert weights.matrix("embed").format == "bf16"
    assert torch.equal(weights.matrix("layers.0.hc_attn_fn").data, stored["layers.0.hc_attn_fn"])
    norm = weights.dense("norm.weight")
    assert norm.dtype == torch.float32
    assert torch.equal(norm, stored["norm.weight"].float())
    norm += 1  # its own memory
    rows = torch.tensor([7, 600])
    scale = stored["layers.1.engram.embed.scale"].float()[rows].repeat_interleave(32, 1)
    expected = stored["layers.1.engram.embed.weight"].float()[rows] * scale
    for in_memory in (False, True):
        table = StoredWeights(Checkpoint.open(folder), engram_in_memory=in_memory).engram_table("layers.1.engram.embed")
        assert torch.equal(table.gather(rows), expected)


def test_single_file_and_model_prefix(folder: Path) -> None:
    def add_prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    expected = raw_bytes(Checkpoint.open(folder).tensor("norm.weight"))
    change(folder, add_prefix)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(ModelConfig.load(folder))
    assert raw_bytes(checkpoint.tensor("norm.weight")) == expected


def test_norms_and_gates_in_either_width(folder: Path) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("layers.0.ffn.gate.weight", "layers.2.attn.compressor.norm.weight"):
            tensors[name] = tensors[name].float()
        tensors["layers.1.engram.q_weight"] = tensors["layers.1.engram.q_weight"].bfloat16()

    change(folder, swap)
    Checkpoint.open(folder).check(ModelConfig.load(folder))


def test_unaligned_tensor_is_copied_not_misread(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    for pad in range(4):  # whatever the header's length
        write_raw(tmp_path / "model.safetensors", header | {"__metadata__": {"pad": " " * pad}}, b"\x07" + raw_bytes(values))
        got = Checkpoint.open(tmp_path).tensor("b")
        assert torch.equal(got, values)
        assert got.data_ptr() % 4 == 0


def test_all_unfitting_tensors_in_one_error(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.0.attn.wq_a.scale"], tensors["layers.3.attn_norm.weight"]
        tensors["layers.1.attn.wq_a.weight"] = tensors["layers.1.attn.wq_a.weight"].float()
        tensors["head.weight"] = tensors["head.weight"][:-1].clone()
        tensors["surprise"] = torch.zeros(1)

    change(folder, spoil)
    text = failure(folder)
    assert "5 tensors do not fit config.json" in text
    for line in (
        "layers.0.attn.wq_a.scale: missing, the scale of layers.0.attn.wq_a.weight",
        "layers.3.attn_norm.weight: missing",
        "layers.1.attn.wq_a.weight: dtype F32, expected F8_E4M3",
        "head.weight: shape [404, 256], expected [405, 256]",
        "surprise: unexpected",
    ):
        assert f"- {line}" in text


def test_checkpoint_of_another_size_of_model(checkpoint_of: Callable[[str], Path], folder: Path) -> None:
    shutil.copy(checkpoint_of("deep") / "config.json", folder / "config.json")
    assert "layers.39.attn_norm.weight: missing" in "\n".join(_problems(folder))


def _problems(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder).check(ModelConfig.load(folder))
    return caught.value.problems


def test_missing_and_truncated_shards_are_told_together(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    shard = folder / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    text = failure(folder)
    assert f"{SHARDS[0]}: missing" in text
    assert f"{SHARDS[1]}: truncated" in text


@pytest.mark.parametrize("length", [0, 5, 100])
def test_shard_cut_inside_its_header(folder: Path, length: int) -> None:
    shard = folder / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:length])
    assert "truncated" in failure(folder)


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..", "", "a\\b.safetensors"]
)
def test_shard_outside_the_folder_is_refused(folder: Path, shard: str) -> None:
    (folder.parent / "model.safetensors").write_bytes((folder / SHARDS[0]).read_bytes())
    index = json.loads((folder / INDEX).read_text())
    for name in index["weight_map"]:
        index["weight_map"][name] = shard
    (folder / INDEX).write_text(json.dumps(index))
    assert "refused" in failure(folder) or "not a safetensors file" in failure(folder)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_never_opened(folder: Path, name: str) -> None:
    for file in (*SHARDS, INDEX):
        (folder / file).unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    text = failure(folder)
    assert name in text
    assert "convert the weights to safetensors" in text
    (folder / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    assert "only safetensors files are read" in failure(folder)


def test_empty_folder_and_malformed_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"norm.weight": 3}}')
    assert "weight_map" in failure(folder)
    (folder / INDEX).write_text("{")
    assert "cannot be read" in failure(folder)
    for file in (*SHARDS, INDEX):
        (folder / file).unlink()
    assert f"neither {INDEX} nor model.safetensors" in failure(folder)


def test_index_and_shards_that_disagree(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = SHARDS[0]
    del index["weight_map"]["norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    text = failure(folder)
    assert "'ghost' is in the index but not in the file" in text
    assert "'norm.weight' is in the file but not in the index" in text


def entry(dtype: str = "U8", shape: Any = (4,), start: Any = 0, stop: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "size", "words"),
    [
        ({"a": entry(), "b": entry(start=5, stop=9)}, 9, "begins at byte"),
        ({"a": entry(), "b": entry(start=2, stop=6)}, 6, "begins at byte"),
        ({"a": entry()}, 3, "truncated"),
        ({"a": entry()}, 9, "5 bytes more"),
        ({"a": entry("F32")}, 4, "has 4 bytes"),
        ({"a": entry(start=4, stop=0)}, 4, "has -4 bytes"),
        ({"a": entry(shape=[-4])}, 4, "malformed"),
        ({"a": entry(shape=4)}, 4, "malformed"),
        ({"a": entry(start=False)}, 4, "malformed"),
        ({"a": {"dtype": "U8"}}, 4, "malformed"),
        ({"a": 3}, 4, "malformed"),
        ([], 0, "not a JSON object"),
        (b'{"a": {}, "a": {}}', 0, "occurs twice"),
        (b"\xff\xfe", 0, "malformed"),
        (b"[" * 100_000, 0, "malformed"),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: object, size: int, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_header(write_raw(tmp_path / "x.safetensors", header, bytes(size)))


def test_header_length_beyond_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)
