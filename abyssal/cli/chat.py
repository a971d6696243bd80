"""`abyssal chat`: a conversation on the terminal, or over piped stdin with one message a line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from ..config.engine import EngineConfig
from ..core.errors import InvalidRequest
from ..core.sampling_params import SamplingParams
from . import arguments
from .generate import NO_ENGINE_SEED
from .terminal import GrowingText

if TYPE_CHECKING:
    from ..llm import LLM

COMMANDS_HELP = "/reset forgets the conversation, /system TEXT sets the system message and resets, /exit leaves"


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "chat",
        allow_abbrev=False,
        help="talk to the model",
        description=f"Talk to the model; piped stdin is read as one message a line. While talking: {COMMANDS_HELP}.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--thinking", action="store_true", help="let the model reason first; shown dimmed")
    parser.add_argument("--effort", help="how much to reason: low, high or max; implies --thinking")
    arguments.add_model(parser)
    arguments.add_sampling(parser, skip=("n",))
    arguments.add_engine(parser, skip=NO_ENGINE_SEED)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until /exit or the end of input."""
    model = arguments.require_model(args)
    params = SamplingParams(**arguments.given(args, SamplingParams))
    settings = arguments.given(args, EngineConfig, skip=NO_ENGINE_SEED)
    from ..llm import LLM

    with LLM(model, revision=args.revision, assume_yes=args.yes, **settings) as llm:
        conversation = Conversation(
            llm, params, args.system, thinking=args.thinking or bool(args.effort), effort=args.effort
        )
        interactive = sys.stdin.isatty()
        if interactive:
            print(COMMANDS_HELP)
        while (line := _read_line(interactive)) is not None:
            if not conversation.take(line):
                break
    return 0


class Conversation:
    """What was said, and how to go on."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, *, thinking: bool, effort: str | None) -> None:
        self._llm, self._params = llm, params
        self._thinking, self._effort = thinking, effort
        self._system = system
        self._messages: list[dict[str, Any]] = []

    def take(self, line: str) -> bool:
        """Obey a command or answer a message; False to leave."""
        command, _, rest = line.strip().partition(" ")
        if command == "/exit":
            return False
        if command in ("/reset", "/system"):
            self._messages.clear()
            self._system = rest.strip() or None if command == "/system" else self._system
        elif command.startswith("/"):
            print(COMMANDS_HELP, file=sys.stderr)
        elif command:
            self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        message = {"role": "user", "content": text}
        try:
            reply = self._print_answer([*system, *self._messages, message])
        except InvalidRequest as error:
            print(f"abyssal: error: {error}", file=sys.stderr)
            return
        if reply is not None:
            self._messages += [message, reply]

    def _print_answer(self, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Stream the answer; None if it failed. Ctrl-C on a terminal ends it there and keeps what has come."""
        reasoning, content = GrowingText(dimmed=True), GrowingText()
        reply: dict[str, Any] = {"role": "assistant", "content": ""}
        stream = self._llm.stream_chat(messages, self._params, thinking=self._thinking, effort=self._effort)
        try:
            for output in stream:
                completion = output.outputs[0]
                if completion.reasoning:
                    reasoning.show(completion.reasoning)
                    reply["reasoning_content"] = completion.reasoning
                if completion.text and content.is_empty and not reasoning.is_empty:
                    print("\n")
                content.show(completion.text)
                reply["content"] = completion.text
                if output.error is not None:
                    print(f"\nabyssal: error: {output.error}", file=sys.stderr)
                    return None
        except KeyboardInterrupt:
            stream.close()  # type: ignore[attr-defined]
            if not sys.stdin.isatty():
                raise
        print()
        return reply


def _read_line(interactive: bool) -> str | None:
    """The next message, None at the end of input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (makes input() editable)

    try:
        return input("> ")
    except EOFError:
        print()
        return None
