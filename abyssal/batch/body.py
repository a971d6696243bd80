"""Reading the body of a request: each field is asked for, and one that nothing asked for is refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from ..core.errors import InvalidRequest
from ..core.sampling_params import SamplingParams
from .lines import LineRefused

HARMLESS = frozenset(
    ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Fields that say nothing about the answer. `model` is looked at where names were given that a line may ask for."""

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "stream_options": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("auto",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that users know from elsewhere, with the values beside null that ask for nothing. Others are refused where nothing
here reads them."""

SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams)) - {"detokenize", "structured", "structured_outputs"}
"""Fields of SamplingParams that a body sets by their own name."""


class Body:
    """The fields of one request's body. A null is the same as a field that is missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    def take(self, name: str) -> Any:
        """The value as it stands, None if there is none."""
        self._read.add(name)
        return self._values.get(name)

    def flag(self, name: str) -> bool | None:
        """A truth value."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(name, value, "must be true or false")
        return value

    def sampling(self, *, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
        """The fields that SamplingParams has under the same name; null means its default."""
        names = SAMPLING_FIELDS - skip
        self._read |= names
        return {name: value for name, value in self._values.items() if name in names and value is not None}

    def refuse_unread(self) -> None:
        """Be sure that nothing is ignored that could have been meant to change the answer.

        Raises:
            LineRefused: naming the first such field.
        """
        for name, value in self._values.items():
            if name in self._read or name in HARMLESS:
                continue
            if name not in WITHOUT_EFFECT:
                self._refuse_unknown(name)
            if value is not None and not any(_same(value, allowed) for allowed in WITHOUT_EFFECT[name]):
                refuse_value(name, value, "is not supported here; leave it out")

    def _refuse_unknown(self, name: str) -> NoReturn:
        close = difflib.get_close_matches(name[:64], self._read | HARMLESS | set(WITHOUT_EFFECT), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise LineRefused("unknown_field", f"body has an unknown field {name!r:.80}{hint}", parameter=name, status=400)


def refuse_value(name: str, value: object, reason: str) -> NoReturn:
    """Refuse a field that is known, but cannot be obeyed."""
    raise LineRefused("unsupported_value", f"{name}={value!r:.80}: {reason}", parameter=name, status=400)


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)
