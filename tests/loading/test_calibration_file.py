"""Temperatures beside a model: written, read, and refused where they do not fit."""

import json

import pytest

from abyssal.core.errors import ConfigError
from abyssal.loading.calibration import CALIBRATION_FILE, read_temperatures, write_temperatures


def test_each_kind_of_acceptance_has_its_own(tmp_path):
    path = tmp_path / CALIBRATION_FILE
    assert read_temperatures(tmp_path, 2, "coupled") is None
    write_temperatures(path, (1.5, 2.0), "coupled", {"num_drafts": [10, 5]})
    assert read_temperatures(tmp_path, 2, "coupled") == (1.5, 2.0)
    assert read_temperatures(tmp_path, 2, "rejection") is None
    write_temperatures(path, (0.5, 1.0), "rejection", {})
    write_temperatures(path, (3.0, 1.0), "coupled", {})
    assert read_temperatures(tmp_path, 2, "coupled") == (3.0, 1.0)
    assert read_temperatures(tmp_path, 2, "rejection") == (0.5, 1.0)


BAD = {
    "no JSON": "{",
    "no object": "[1]",
    "no temperatures": "{}",
    "a list": '{"temperatures": [1, 2]}',
    "too many": '{"temperatures": {"coupled": [1, 2, 3]}}',
    "zero": '{"temperatures": {"coupled": [1, 0]}}',
    "no number": '{"temperatures": {"coupled": [1, "x"]}}',
    "infinite": '{"temperatures": {"coupled": [1, Infinity]}}',
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_named(tmp_path, content):
    (tmp_path / CALIBRATION_FILE).write_text(content)
    with pytest.raises(ConfigError, match=f"{CALIBRATION_FILE}.*remove the file"):
        read_temperatures(tmp_path, 2, "coupled")


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"temperatures": [1, 2], "figures": {}}', '{"temperatures": {}}'])
def test_a_file_of_something_else_is_not_written_over(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"file\.json.*remove the file"):
        write_temperatures(path, (1.0,), "coupled", {})
    assert path.read_text() == content


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="--out"):
        write_temperatures(tmp_path / "no" / "file", (1.0,), "coupled", {})


def test_figures_are_kept(tmp_path):
    path = tmp_path / "file"
    write_temperatures(path, (1.0,), "coupled", {"error_after": [0.01]})
    assert json.loads(path.read_text())["figures"] == {"coupled": {"error_after": [0.01]}}
