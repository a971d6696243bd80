"""Synthetic drafts, which a benchmark uses too."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    path = Path(__file__).parents[1] / "support" / "synthetic_drafts.py"
    spec = importlib.util.spec_from_file_location("synthetic_drafts", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["synthetic_drafts"] = module
    spec.loader.exec_module(module)
    return module
