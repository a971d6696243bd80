"""A model argument to a local folder: a path, a hub id downloaded on first use, or `flash` for the released model."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config.model import ModelConfig
from ..config.released import RELEASED_REPO, released_config
from ..core.errors import CapacityExceeded, ConfigError, ModelNotFound
from .names import INDEX_FILE, SINGLE_FILE

ALIASES = {"flash": RELEASED_REPO}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_NEEDED = ["inference/*", "encoding/*"]


def resolve_model(
    model: str | Path, *, revision: str | None = None, assume_yes: bool = True, with_weights: bool = True
) -> Path:
    """Find a model, downloading it if it is on the hub and not cached.

    Args:
        model: a folder, a hub id (`owner/name`), or an alias.
        revision: branch, tag or commit of a hub model.
        assume_yes: do not ask on a terminal before a download.
        with_weights: False to fetch only configuration and tokenizer.

    Raises:
        ModelNotFound: if there is no such folder, or the hub cannot be reached and the cache lacks the model.
        ConfigError: for a revision of a local folder.
        CapacityExceeded: if the disk has no room for the download.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(f"revision={revision!r}: only a hub model has revisions, but {model} is a local folder")
        return folder
    hub_id = _hub_id(model)
    cached = _cached(hub_id, revision, with_weights)
    return cached if cached is not None else _download(hub_id, revision, assume_yes, with_weights)


def resolve_config(model: str | Path, *, revision: str | None = None) -> ModelConfig:
    """The configuration of a model without its weights. `flash` needs no network; a path may name a config.json itself.

    Raises:
        ModelNotFound, ConfigError: as for `resolve_model`.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return ModelConfig.from_json(path)
    if not path.is_dir() and model in ALIASES and revision is None:
        return released_config()
    return ModelConfig.load(resolve_model(model, revision=revision, with_weights=False))


def _hub_id(model: str | Path) -> str:
    text = str(model)
    if isinstance(model, str) and text in ALIASES:
        return ALIASES[text]
    if isinstance(model, str) and _HUB_ID.fullmatch(text):
        return text
    path = Path(text).expanduser()
    if path.exists():
        raise ModelNotFound(f"model {text!r} is a file. A model is the folder that holds its config.json")
    raise ModelNotFound(
        f"model {text!r}: there is no folder {path.absolute()}. Give an existing folder, a hub id such as "
        f"{RELEASED_REPO!r}, or {next(iter(ALIASES))!r} for that one"
    )


def _wanted(with_weights: bool) -> list[str]:
    return ["*.json", "*.safetensors"] if with_weights else ["*.json"]


def _cached(hub_id: str, revision: str | None, with_weights: bool) -> Path | None:
    """The model's folder in the hub cache if everything is there."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            hub_id,
            revision=revision,
            local_files_only=True,
            allow_patterns=_wanted(with_weights),
            ignore_patterns=_NOT_NEEDED,
        )
    except OSError:
        return None
    folder = Path(found)
    return folder if _is_complete(folder, with_weights) else None


def _is_complete(folder: Path, with_weights: bool) -> bool:
    if not (folder / "config.json").is_file():
        return False
    if not with_weights or (folder / SINGLE_FILE).is_file():
        return True
    try:
        shards = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / str(shard)).is_file() for shard in shards)


def _download(hub_id: str, revision: str | None, assume_yes: bool, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    def ask(dry_run: bool) -> Any:
        return snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=_wanted(with_weights),
            ignore_patterns=_NOT_NEEDED,
            dry_run=dry_run,
        )

    files = _explained(hub_id, revision, lambda: ask(dry_run=True))
    missing = [file for file in files if file.will_download]
    size = sum(file.file_size or 0 for file in missing)
    cache = _cache_folder()
    _announce(f"{hub_id}: downloading {len(missing)} files, {_readable(size)}, into {cache}")
    _check_disk(cache, size, hub_id)
    if with_weights and not assume_yes and sys.stdin.isatty() and not _confirmed():
        raise ModelNotFound(f"model {hub_id!r} was not downloaded, as you asked. {_ways_out(hub_id)}")
    folder = Path(_explained(hub_id, revision, lambda: ask(dry_run=False)))
    if not _is_complete(folder, with_weights):
        raise ModelNotFound(f"model {hub_id!r} at {folder} has no config.json with safetensors, so it cannot be run")
    return folder


def _explained(hub_id: str, revision: str | None, ask: Callable[[], Any]) -> Any:
    """Call the hub, and explain it if that fails."""
    try:
        return ask()
    except Exception as error:  # the hub's client lets errors of its HTTP library through
        at = "" if revision is None else f" (revision {revision})"
        reason = str(error).strip().split("\n")[0]
        raise ModelNotFound(
            f"model {hub_id!r}{at} is no local folder, is not complete in the cache {_cache_folder()}, and could not be had "
            f"from the hub: {reason}. {_ways_out(hub_id)}"
        ) from error


def _ways_out(hub_id: str) -> str:
    from huggingface_hub import constants

    offline = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "set HF_HUB_OFFLINE=1 once the cache has it"
    return (
        f"Either give the path of a folder that holds the model; or run `hf download {hub_id}` where there is a network, "
        f"with HF_HOME or HF_HUB_CACHE naming a cache that this machine sees; or {offline}"
    )


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _check_disk(cache: Path, size: int, hub_id: str) -> None:
    existing = next(parent for parent in (cache, *cache.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise CapacityExceeded(
            f"{hub_id} needs {_readable(size)} of disk, but {cache} has {_readable(free)} free. "
            "Point HF_HOME or HF_HUB_CACHE at a larger disk"
        )


def _announce(text: str) -> None:
    """A line for the user, beside the progress bars on stderr."""
    print(text, file=sys.stderr)


def _confirmed() -> bool:
    print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _readable(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
