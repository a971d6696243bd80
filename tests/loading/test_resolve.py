"""From a model argument to a folder, with a hub made of functions: what is asked of it, and what the user is told."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from abyssal.config.released import released_config
from abyssal.core.errors import CapacityExceeded, ConfigError, ModelNotFound
from abyssal.loading import resolve
from abyssal.loading.resolve import resolve_config, resolve_model

RELEASED = "deepseek-ai/DeepSeek-V4.1-Flash-1017"


class FakeFile:
    def __init__(self, size: int, will_download: bool = True) -> None:
        self.file_size = size
        self.will_download = will_download


class FakeHub:
    """A hub that has one model, copied into the cache on download."""

    def __init__(self, source: Path, cache: Path) -> None:
        self.source = source
        self.snapshot = cache / "snapshot"
        self.calls: list[dict[str, Any]] = []
        self.sizes = [2_000_000, 500_000]

    def snapshot_download(self, repo_id: str, **options: Any) -> Any:
        self.calls.append({"repo_id": repo_id, **options})
        if options.get("local_files_only"):
            if not self.snapshot.is_dir():
                raise LocalEntryNotFoundError("not cached")
            return str(self.snapshot)
        if options.get("dry_run"):
            return [*map(FakeFile, self.sizes), FakeFile(10**15, will_download=False)]
        shutil.copytree(self.source, self.snapshot, dirs_exist_ok=True)
        return str(self.snapshot)

    @property
    def downloads(self) -> list[dict[str, Any]]:
        return [call for call in self.calls if not call.get("dry_run") and not call.get("local_files_only")]


@pytest.fixture
def hub(checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(checkpoint_of("micro"), tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return fake


def test_local_folder_is_taken_as_it_is(hub: FakeHub, checkpoint_of: Callable[[str], Path]) -> None:
    folder = checkpoint_of("micro")
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder
    assert not hub.calls


def test_revision_of_a_folder_is_refused(checkpoint_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="revision='main'"):
        resolve_model(checkpoint_of("micro"), revision="main")


@pytest.mark.parametrize(
    "model", ["./missing", "/missing/folder", "~/missing", "missing", "a/b/c", "..", Path("a/b"), "a/b/"]
)
def test_paths_that_do_not_exist_never_reach_the_hub(
    hub: FakeHub, model: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(ModelNotFound, match="there is no folder"):
        resolve_model(model)
    assert not hub.calls


def test_a_file_is_no_model(checkpoint_of: Callable[[str], Path]) -> None:
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve_model(checkpoint_of("micro") / "config.json")


def test_download_once_with_its_size_shown_first(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve_model("flash", revision="abc") == hub.snapshot
    (call,) = hub.downloads
    assert (call["repo_id"], call["revision"]) == (RELEASED, "abc")
    assert "*.safetensors" in call["allow_patterns"]
    assert "downloading 2 files, 2.5 MB" in capsys.readouterr().err
    assert resolve_model("flash", revision="abc") == hub.snapshot
    assert len(hub.downloads) == 1


def test_incomplete_cache_is_completed(hub: FakeHub) -> None:
    shutil.copytree(hub.source, hub.snapshot)
    (hub.snapshot / "model-00002-of-00002.safetensors").unlink()
    assert resolve_model("owner/name") == hub.snapshot
    assert len(hub.downloads) == 1


def test_configuration_alone(hub: FakeHub) -> None:
    config = resolve_config("owner/name")
    assert config.text.hidden_size == 256
    (call,) = hub.downloads
    assert call["allow_patterns"] == ["*.json"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "downloads"), [("y\n", 1), ("yes\n", 1), ("n\n", 0), ("\n", 0), ("", 0)])
def test_confirmation_on_a_terminal(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, answer: str, downloads: int) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    if downloads:
        resolve_model("owner/name", assume_yes=False)
    else:
        with pytest.raises(ModelNotFound, match="was not downloaded, as you asked"):
            resolve_model("owner/name", assume_yes=False)
    assert len(hub.downloads) == downloads


def test_nobody_is_asked_without_a_terminal_or_with_yes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    resolve_model("owner/name", assume_yes=False)
    shutil.rmtree(hub.snapshot)
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    resolve_model("owner/name", assume_yes=True)
    assert len(hub.downloads) == 2


def test_full_disk_is_told_before_the_download(hub: FakeHub) -> None:
    hub.sizes = [10**18]
    with pytest.raises(CapacityExceeded, match=r"needs 1000000000\.0 GB of disk"):
        resolve_model("owner/name")
    assert not hub.downloads


def test_repository_without_a_model(hub: FakeHub, tmp_path: Path) -> None:
    hub.source = tmp_path / "empty"
    hub.source.mkdir()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model("owner/name")


def test_offline_and_not_cached_tells_what_where_and_three_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the library itself, told that there is no network
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("flash")
    text = str(caught.value)
    for part in (RELEASED, str(tmp_path / "hub"), "path of a folder", f"hf download {RELEASED}", "unset HF_HUB_OFFLINE"):
        assert part in text


def test_flash_can_be_planned_for_offline(hub: FakeHub, checkpoint_of: Callable[[str], Path]) -> None:
    assert resolve_config("flash") == released_config()
    assert not hub.calls
    assert resolve_config(checkpoint_of("deep") / "config.json").text.num_hidden_layers == 40


def test_sizes_are_readable() -> None:
    assert resolve._readable(510_286_023_000) == "510.3 GB"
    assert resolve._readable(2_500_000) == "2.5 MB"
