"""Plain torch on the card: where tensors go, and ops of the reference that run there as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def on_card(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A reference op whose own new tensors (indices, fills) lie on the card, as its inputs do."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cuda"):
            return fn(*args, **kwargs)

    run.__qualname__ = f"{fn.__qualname__} (torch on the card)"
    return run


def on_host(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An op that is served by the processor, on tensors in the host's memory."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    run.__qualname__ = f"{getattr(fn, '__qualname__', 'op')} (on the host)"
    return run


def to_card(value: Any) -> Any:
    """A copy of a dataclass, dict or tensor with all its tensors on the card."""
    if isinstance(value, torch.Tensor):
        return value.to("cuda")
    if isinstance(value, dict):
        return {key: to_card(part) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: to_card(getattr(value, field.name)) for field in fields(value)})
    return value
