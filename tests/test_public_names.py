"""What `import agentlightning` offers can be had, and says what it is."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import agentlightning


@pytest.mark.parametrize("name", agentlightning.__all__)
def test_every_public_name_can_be_had_and_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(agentlightning, name))


def test_every_public_name_comes_from_where_type_checkers_are_told() -> None:
    tree = ast.parse(Path(agentlightning.__file__).read_text(encoding="utf-8"))

    told = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("agentlightning.")
        for alias in node.names
    }

    assert told == {name: f"agentlightning.{home}" for name, home in agentlightning._HOMES.items()}
    assert sorted(told) == sorted(agentlightning.__all__)
