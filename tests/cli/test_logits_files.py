import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from abyssal.cli.logits import read_input_ids
from abyssal.cli.main import main
from abyssal.core.errors import ConfigError


@pytest.mark.parametrize(
    "content", [[1, 2, 3], [[1, 2, 3]], {"input_ids": [1, 2, 3]}, {"input_ids": [[1, 2, 3]], "more": 1}]
)
def test_json(tmp_path: Path, content: object) -> None:
    (tmp_path / "ids").write_text(" \n" + json.dumps(content))
    assert read_input_ids(tmp_path / "ids") == [1, 2, 3]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("shape", [(3,), (1, 3)])
@pytest.mark.parametrize("padding", [0, 19, 51, 83])
def test_safetensors(tmp_path: Path, dtype: type, shape: tuple[int, ...], padding: int) -> None:
    """The padding moves the header's length, whose lowest byte may look like the beginning of a JSON text."""
    other = {"x" * padding: np.zeros(2, np.float32)} if padding else {}
    save_file({"input_ids": np.array([1, 2, 3], dtype).reshape(shape), **other}, tmp_path / "ids")
    assert read_input_ids(tmp_path / "ids") == [1, 2, 3]


@pytest.mark.parametrize(
    "content", ["", "x", "[1, 2", '{"ids": [1]}', "5", "[1.5]", "[true]", '["1"]', "[[1], [2]]", "null"]
)
def test_bad_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "ids").write_text(content)
    with pytest.raises(ConfigError, match=r"--input-ids .*ids"):
        read_input_ids(tmp_path / "ids")


def test_bad_safetensors(tmp_path: Path) -> None:
    for name, tensors in {
        "unnamed": {"ids": np.array([1])},
        "float": {"input_ids": np.array([1.0])},
        "table": {"input_ids": np.ones((2, 2), np.int64)},
    }.items():
        save_file(tensors, tmp_path / name)
        with pytest.raises(ConfigError, match=f"--input-ids .*{name}"):
            read_input_ids(tmp_path / name)
    whole = (tmp_path / "table").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-5])
    with pytest.raises(ConfigError, match=r"--input-ids .*cut"):
        read_input_ids(tmp_path / "cut")


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_input_ids(tmp_path / "none")
    (tmp_path / "ids").write_text("[1]")
    assert main(["logits", "--model", "m", "--input-ids", str(tmp_path / "ids"), "--out", str(tmp_path / "no" / "out")]) == 2
    assert "folder" in capsys.readouterr().err
