"""`abyssal generate`: complete prompts from arguments, a file or stdin."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.engine import EngineConfig
from ..core.errors import ConfigError
from ..core.outputs import CompletionOutput, RequestOutput
from ..core.sampling_params import SamplingParams
from ..structured.spec import StructuredOutput
from . import arguments
from .terminal import GrowingText, dim, on_terminal

if TYPE_CHECKING:
    from ..llm import LLM

NO_PROMPT = "no prompt: give one as an argument, by --prompt-file, or on stdin"
NO_ENGINE_SEED = ("seed",)
"""`--seed` is the sampling seed here, so that it means the same as in Python's SamplingParams."""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "generate",
        allow_abbrev=False,
        help="complete prompts",
        description="Complete prompts from arguments, a file or stdin. One prompt is streamed to a terminal.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    parser.add_argument("--prompt-file", metavar="FILE", help="one prompt a line; - reads stdin")
    parser.add_argument("--json", action="store_true", help="a JSON object for each output, as prompts finish")
    constraint = parser.add_argument_group("constraint").add_mutually_exclusive_group()
    constraint.add_argument("--json-schema", metavar="FILE", help="output satisfies the JSON schema in a file")
    constraint.add_argument("--regex", metavar="REGEX", help="the whole output matches an expression")
    constraint.add_argument("--grammar", metavar="FILE", help="output satisfies the grammar in a file, Lark or GBNF")
    arguments.add_model(parser)
    arguments.add_sampling(parser)
    arguments.add_engine(parser, skip=NO_ENGINE_SEED)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate; 2 if any prompt was refused."""
    model = arguments.require_model(args)
    params = SamplingParams(**arguments.given(args, SamplingParams))
    structured = _constraint(args)
    settings = arguments.given(args, EngineConfig, skip=NO_ENGINE_SEED)
    prompts = iter(_prompts(args))
    first = list(itertools.islice(prompts, 2))
    if not first:
        raise ConfigError(NO_PROMPT)
    from ..llm import LLM

    with LLM(model, revision=args.revision, assume_yes=args.yes, **settings) as llm:
        alone = len(first) == 1 and params.n == 1
        if alone and not args.json and sys.stdout.isatty():
            return _stream(llm, first[0], params, structured)
        completed = llm.as_completed(itertools.chain(first, prompts), params, structured=structured)
        return _print_json(completed) if args.json else _print_texts(_in_order(completed), titled=not alone)


def _constraint(args: argparse.Namespace) -> StructuredOutput | None:
    """What the output has to satisfy, if anything.

    Raises:
        ConfigError: if the file cannot be read.
        InvalidRequest: for what is no schema, expression or grammar.
    """
    if args.json_schema is not None:
        return StructuredOutput(json=_read("--json-schema", args.json_schema))
    if args.grammar is not None:
        return StructuredOutput(grammar=_read("--grammar", args.grammar))
    return None if args.regex is None else StructuredOutput(regex=args.regex)


def _read(flag: str, name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {name} cannot be read: {error}") from error


def _prompts(args: argparse.Namespace) -> Iterable[str]:
    """The prompts, read from files as they are needed.

    Raises:
        ConfigError: if there is none, or the file cannot be read.
    """
    if args.prompts and args.prompt_file:
        raise ConfigError("give prompts either as arguments or by --prompt-file, not both")
    if args.prompts:
        return list(args.prompts)
    if args.prompt_file and args.prompt_file != "-":
        path = Path(args.prompt_file)
        if not path.is_file():
            raise ConfigError(f"--prompt-file {path} does not exist or is no file")
        return _lines(path.open(encoding="utf-8"), str(path))
    if args.prompt_file is None and sys.stdin.isatty():
        raise ConfigError(NO_PROMPT)
    return _lines(sys.stdin, "stdin")


def _lines(stream: Iterable[str], name: str) -> Iterator[str]:
    try:
        for line in stream:
            if line.strip():
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error}") from error


def _stream(llm: LLM, prompt: str, params: SamplingParams, structured: StructuredOutput | None) -> int:
    growing = GrowingText()
    for output in llm.stream(prompt, params, structured=structured):
        growing.show(output.outputs[0].text)
        if output.error is not None:
            return _complain(0, output)
    print()
    return 0


def _in_order(completed: Iterable[tuple[int, RequestOutput]]) -> Iterator[RequestOutput]:
    early: dict[int, RequestOutput] = {}
    following = 0
    for index, output in completed:
        early[index] = output
        while following in early:
            yield early.pop(following)
            following += 1


def _print_texts(outputs: Iterable[RequestOutput], *, titled: bool) -> int:
    status = 0
    for index, output in enumerate(outputs):
        if output.error is not None:
            status = _complain(index, output)
            continue
        for completion in output.outputs:
            if titled:
                sample = f".{completion.index}" if len(output.outputs) > 1 else ""
                print(dim(on_terminal(f"[{index}{sample}] {output.prompt}")))
            print(on_terminal(completion.text), flush=True)
    return status


def _print_json(completed: Iterable[tuple[int, RequestOutput]]) -> int:
    status = 0
    for index, output in completed:
        for completion in output.outputs:
            print(json.dumps(_record(index, output, completion), ensure_ascii=False), flush=True)
        status = 2 if output.error is not None else status
    return status


def _record(index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": index,
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
    }
    if len(output.outputs) > 1:
        record["sample"] = completion.index
    if output.error is not None:
        record["error"] = output.error
    if completion.logprobs is not None:
        record["logprobs"] = [asdict(entry) for entry in completion.logprobs]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [None if entry is None else asdict(entry) for entry in output.prompt_logprobs]
    return record


def _complain(index: int, output: RequestOutput) -> int:
    print(f"abyssal: error: prompt {index}: {output.error}", file=sys.stderr)
    return 2
