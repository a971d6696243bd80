"""Log-probabilities in the two forms of OpenAI's API, and prompt log-probabilities in vLLM's."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.batch import TokenLogprobs

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = []
    for entry in entries:
        top = [_chat_entry(token_id, logprob, tokenizer) for token_id, logprob in entry.top]
        content.append({**_chat_entry(entry.token_id, entry.logprob, tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, *, skip_special_tokens: bool
) -> dict[str, Any]:
    """`logprobs` of a completion choice. `text_offset` counts characters of the text before each token."""
    hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offset, offsets = 0, []
    for entry in entries:
        offsets.append(offset)
        if entry.token_id not in hidden:
            offset += len(decoder.decode(tokenizer.token_bytes(entry.token_id)))
    return {
        "tokens": [_name(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [{_name(i, tokenizer): _finite(p) for i, p in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None) -> list[dict[str, Any] | None]:
    """By token id: the most likely tokens and the prompt's own; None for the first token."""
    return [None if entry is None else _prompt_entry(entry, tokenizer) for entry in entries]


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": _finite(logprob), "bytes": list(spelled)}


def _prompt_entry(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, Any]:
    def described(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.token_text(token_id)
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    listed = {str(token_id): described(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
    listed[str(entry.token_id)] = described(entry.token_id, entry.logprob, entry.rank)
    return listed


def _name(token_id: int, tokenizer: Tokenizer) -> str:
    """Text of a token, or its bytes where they are no text, so that no two tokens of the latter kind look the same."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
