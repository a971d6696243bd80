"""The compressed vocabulary of Engram: tokens that read alike once normalised share one id."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import normalizers

from ..config.model import TextConfig
from ..core.errors import CheckpointError
from .tokenizer import TOKENIZER_FILE

REPLACEMENT = "\ufffd"
LONE_SPACE = "\ue000"
"""A private character that stands for a token of one space while both ends are stripped."""


def token_map_of(folder: Path, config: TextConfig) -> npt.NDArray[np.int64]:
    """Compressed id of each raw id for the model in a folder: int64 [vocab_size].

    Without a tokenizer nothing tells which tokens read alike; then raw ids are folded into the compressed range.

    Raises:
        CheckpointError: if the tokenizer does not give the number of compressed ids that the model was trained with.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return np.arange(config.vocab_size, dtype=np.int64) % config.engram_compressed_vocab_size
    compressed = compressed_token_map(path, config.vocab_size)
    count = int(compressed.max()) + 1
    if count != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{path} has {count} distinct tokens once normalised, but config.json says engram_compressed_vocab_size="
            f"{config.engram_compressed_vocab_size}: it belongs to another model"
        )
    return compressed


def compressed_token_map(tokenizer: tokenizers.Tokenizer | str | Path, vocab_size: int) -> npt.NDArray[np.int64]:
    """Compressed id of each raw id, in order of first appearance: int64 [vocab_size].

    Args:
        tokenizer: or the path of its tokenizer.json.
        vocab_size: rows of the model's embedding. Ids without a token read as the empty text.
    """
    if not isinstance(tokenizer, tokenizers.Tokenizer):
        tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer))
    texts = tokenizer.decode_batch([[i] for i in range(vocab_size)], skip_special_tokens=False)
    normalizer = _normalizer()
    ids: dict[str, int] = {}
    compressed = np.empty(vocab_size, dtype=np.int64)
    for i, text in enumerate(texts):
        # part of a character has no text of its own, so its vocabulary string tells it apart
        raw = tokenizer.id_to_token(i) if REPLACEMENT in text else None
        key = raw if raw is not None else normalizer.normalize_str(text) or text
        compressed[i] = ids.setdefault(key, len(ids))
    return compressed


def _normalizer() -> normalizers.Normalizer:
    """Compatibility forms, accents, case and white space folded."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(tokenizers.Regex(r"^ $"), LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(LONE_SPACE, " "),
        ]
    )
