"""A small vocabulary with its compiler, and the generator of random schemas."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from abyssal.structured.compiler import GrammarCompiler
from abyssal.structured.mask import allocate, allowed_ids, is_allowed
from abyssal.structured.matcher import Matcher
from abyssal.structured.spec import StructuredOutput
from abyssal.structured.vocabulary import Vocabulary


def _load(name: str) -> ModuleType:
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "support" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


_corpus = _load("schema_corpus")


class Kit:
    """Shorthands over one vocabulary."""

    def __init__(self) -> None:
        self.vocabulary: Vocabulary = _corpus.make_vocabulary()
        self.compiler = GrammarCompiler(self.vocabulary)

    def ids(self, text: str) -> list[int]:
        return self.vocabulary.tokenizer.encode(text, add_bos=False)

    def byte_ids(self, text: str) -> list[int]:
        """The same text, one token a byte."""
        by_bytes = {self.vocabulary.tokenizer.token_bytes(i): i for i in self.vocabulary.text_ids}
        return [by_bytes[bytes([b])] for b in text.encode()]

    def text(self, token_ids: list[int]) -> str:
        return _corpus.text_of(self.vocabulary, token_ids)

    def matcher(self, stop_ids: tuple[int, ...] = (), **spec: object) -> Matcher:
        return self.compiler.compile(StructuredOutput(**spec)).matcher(stop_ids)

    def mask(self, matcher: Matcher) -> set[int]:
        row = allocate(1, self.vocabulary.size)[0]
        matcher.fill(row)
        return set(allowed_ids(row, self.vocabulary.size).tolist())

    def feed(self, matcher: Matcher, token_ids: list[int]) -> int:
        """Accept tokens while they are allowed; how many were. What the mask allows has to be accepted.

        The reverse does not hold: where the text is certain, the mask allows only the tokenizer's own spelling of it.
        """
        row = allocate(1, self.vocabulary.size)[0]
        for count, token_id in enumerate(token_ids):
            matcher.fill(row)
            allowed, accepted = is_allowed(row, token_id), matcher.accept(token_id)
            assert accepted or not allowed, f"token {token_id} at {count} is allowed by the mask but not accepted"
            if not accepted:
                return count
        return len(token_ids)

    def accepts(self, text: str, **spec: object) -> bool:
        """Whether a text is a whole answer, spelled in the tokenizer's tokens and byte by byte alike."""
        results = []
        for ids in (self.ids(text), self.byte_ids(text) if "｜DSML｜" not in text else self.ids(text)):
            matcher = self.matcher(**spec)
            results.append(self.feed(matcher, ids) == len(ids) and matcher.is_accepting)
        return all(results)

    def rejects(self, text: str, **spec: object) -> bool:
        """Whether a text is no answer, however it is spelled."""
        results = []
        for ids in (self.ids(text), self.byte_ids(text) if "｜DSML｜" not in text else self.ids(text)):
            matcher = self.matcher(**spec)
            results.append(self.feed(matcher, ids) < len(ids) or not matcher.is_accepting)
        return all(results)


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture(scope="session")
def corpus() -> ModuleType:
    return _corpus
