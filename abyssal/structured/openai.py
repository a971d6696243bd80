"""Constraints as OpenAI's chat requests spell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import InvalidRequest
from .document import Json
from .spec import StructuredOutput, from_response_format

Tools = Sequence[Mapping[str, Json]]


def from_chat(
    *,
    tools: Tools | None = None,
    tool_choice: str | Mapping[str, Json] | None = None,
    parallel_tool_calls: bool = True,
    response_format: Mapping[str, Json] | None = None,
) -> StructuredOutput | None:
    """The one constraint of a chat request; None if the answer is free.

    Raises:
        InvalidRequest: for what cannot be obeyed, alone or together.
    """
    text = from_response_format(response_format)
    calls = from_tools(tools, tool_choice, parallel_tool_calls=parallel_tool_calls)
    if text is not None and tools and tool_choice != "none":
        raise InvalidRequest(
            "response_format", response_format, "leaves no room for tool calls; leave the tools out or set tool_choice=none"
        )
    return text or calls


def from_tools(
    tools: Tools | None, tool_choice: str | Mapping[str, Json] | None = None, *, parallel_tool_calls: bool = True
) -> StructuredOutput | None:
    """The constraint that OpenAI's `tools` and `tool_choice` stand for.

    None where the model is free: it may call or not, no function is `"strict": true`, and calls may follow one another.

    Raises:
        InvalidRequest: for tools or a choice that cannot be obeyed.
    """
    if not tools:
        if tool_choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice", tool_choice, "has no meaning without tools")
        return None
    if tool_choice in (None, "auto"):
        if parallel_tool_calls and not any(_is_strict(tool) for tool in tools):
            return None
        tools = [tool if _is_strict(tool) else _lenient(tool) for tool in tools]
    return StructuredOutput(tools=tools, tool_choice=tool_choice or "auto", parallel_tool_calls=parallel_tool_calls)


def _is_strict(tool: Json) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and function.get("strict") is True


def _lenient(tool: Any) -> Any:
    """A tool whose schema is enforced as far as that is possible."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return {**tool, "function": {**function, "strict": False}} if isinstance(function, Mapping) else tool
