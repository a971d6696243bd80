"""Inference for DeepSeek-V4.1-Flash. Names are loaded on first use, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.engine import EngineConfig
    from .core.outputs import CompletionOutput, RequestOutput
    from .core.sampling_params import SamplingParams
    from .llm import LLM
    from .structured.spec import StructuredOutput

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "StructuredOutput", "__version__"]

_HOMES = {
    "LLM": ".llm",
    "SamplingParams": ".core.sampling_params",
    "EngineConfig": ".config.engine",
    "RequestOutput": ".core.outputs",
    "CompletionOutput": ".core.outputs",
    "StructuredOutput": ".structured.spec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
