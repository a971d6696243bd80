"""`abyssal logits`: logits of every position of given ids, computed by the engine's own path."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.engine import EngineConfig
from ..core.errors import ConfigError
from . import arguments

if TYPE_CHECKING:
    import torch

    from ..llm import LLM


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "logits",
        allow_abbrev=False,
        help="logits of every position",
        description="Compute the logits of every position of given token ids, as generation computes them.",
    )
    number = arguments.positive_int
    parser.add_argument("--input-ids", required=True, metavar="FILE", help="JSON or safetensors with input_ids")
    parser.add_argument("--out", required=True, metavar="FILE", help="safetensors to write: logits, float32 [tokens, vocab]")
    parser.add_argument("--chunk", type=number, metavar="N", help="cut the prompt into chunks of N tokens")
    parser.add_argument(
        "--drafts",
        metavar="FILE",
        help="safetensors with dspark.anchor_positions [N] and dspark.previous_ids [N, block]; adds dspark.base_logits, "
        "dspark.draft_logits, dspark.confidence and dspark.features_last",
    )
    parser.add_argument("--decode-from", type=number, metavar="K", help="feed positions from K on one by one")
    arguments.add_model(parser)
    arguments.add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Score and write."""
    model = arguments.require_model(args)
    settings = arguments.given(args, EngineConfig)
    token_ids = read_input_ids(Path(args.input_ids))
    out = Path(args.out)
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: folder {out.parent} does not exist")
    drafts = None
    if args.drafts is not None:
        drafts = read_drafts(Path(args.drafts))
        # any number loads the drafter; scoring generates nothing that could be drafted
        settings = {"speculation": 1} | settings
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from ..llm import LLM

    with LLM(model, revision=args.revision, assume_yes=args.yes, **settings) as llm:
        tensors = _score(llm, token_ids, drafts, args)
    try:
        save_file(tensors, str(out))
    except SafetensorError as error:
        raise ConfigError(f"--out {out} cannot be written: {error}") from error
    for name, tensor in tensors.items():
        print(f"{out}: {name}, float32 {list(tensor.shape)}")
    return 0


def _score(
    llm: LLM, token_ids: list[int], drafts: tuple[list[int], list[list[int]]] | None, args: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """The tensors to write, by name."""
    if drafts is None:
        return {"logits": llm.score(token_ids, chunk=args.chunk, decode_from=args.decode_from).contiguous()}
    import torch

    anchors, previous_ids = drafts
    scores = llm.engine.score_drafts(
        token_ids, anchors, torch.tensor(previous_ids), chunk=args.chunk, decode_from=args.decode_from
    )
    named = {f"dspark.{name}": tensor for name, tensor in vars(scores).items() if name != "logits"}
    return {name: tensor.contiguous() for name, tensor in ({"logits": scores.logits} | named).items()}


def read_drafts(path: Path) -> tuple[list[int], list[list[int]]]:
    """Anchor positions [N] and the tokens before each drafted one [N, block], from a safetensors file.

    Raises:
        ConfigError: if there is no such file, or it holds something else.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ConfigError(f"--drafts {path} does not exist or is no file")
    found = []
    try:
        with safe_open(str(path), framework="np") as tensors:
            for name, dimensions in (("dspark.anchor_positions", 1), ("dspark.previous_ids", 2)):
                tensor = tensors.get_tensor(name)
                if tensor.ndim != dimensions or tensor.dtype.kind not in "iu" or not tensor.size:
                    raise ConfigError(f"--drafts {path}: {name} must be whole numbers with {dimensions} dimensions")
                found.append(tensor.tolist())
    except SafetensorError as error:
        raise ConfigError(f"--drafts {path} does not hold the anchors and the chains of drafts: {error}") from error
    return found[0], found[1]


def read_input_ids(path: Path) -> list[int]:
    """Token ids of one sequence from a JSON or a safetensors file.

    Raises:
        ConfigError: if the file is neither, or holds no flat list of whole numbers under `input_ids`.
    """
    if not path.is_file():
        raise ConfigError(f"--input-ids {path} does not exist or is no file")
    content = path.read_bytes()
    # A safetensors file begins with the length of its header, which the first characters of a JSON text never are.
    is_safetensors = content[8:9] == b"{" and int.from_bytes(content[:8], "little") < len(content)
    found = _from_safetensors(path) if is_safetensors else _from_json(path, content)
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    if not isinstance(found, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
        raise ConfigError(f"--input-ids {path}: input_ids must be whole numbers of shape [tokens] or [1, tokens]")
    return found


def _from_json(path: Path, content: bytes) -> Any:
    try:
        data = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"--input-ids {path} is neither JSON ({error}) nor safetensors") from error
    return data.get("input_ids") if isinstance(data, dict) else data


def _from_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as tensors:
            return tensors.get_tensor("input_ids").tolist()
    except SafetensorError as error:
        raise ConfigError(f"--input-ids {path} holds no readable input_ids: {error}") from error
