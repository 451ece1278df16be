"""The examples' files are scripts, not packages: they are importable for the tests of one module at a time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def importable(example: str) -> Iterator[Callable[[str], ModuleType]]:
    """Examples have files of the same names: those of this one, and gold_traces, are imported anew and forgotten."""
    folders = [EXAMPLES / example, EXAMPLES]
    names = [path.stem for folder in folders for path in folder.glob("*.py")]
    for name in names:
        sys.modules.pop(name, None)
    sys.path[:0] = map(str, folders)
    yield importlib.import_module
    for folder in folders:
        sys.path.remove(str(folder))
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def module(request: pytest.FixtureRequest) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file of the EXAMPLE that the test's module names."""
    with importable(request.module.EXAMPLE) as imported:
        yield imported


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The warm_start of the example that the test's parameter names."""
    with importable(request.param) as imported:
        yield imported("warm_start")
