"""The source tree keeps its rules of naming: a name means one thing, and a docstring says what it describes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "agentlightning"
MODULES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}

HEADLESS = re.compile(r"(What|That|Whether|How|Why|Where|When|Which|Who|Whose)\b")
"""Openings of a clause without a subject: "Whether it is held" should be "Returns whether it is held"."""
BOUND = re.compile(r"_?(MOST|LONGEST|LARGEST|FEWEST|SHORTEST|SMALLEST)_")


def described() -> Iterator[tuple[str, str]]:
    """Yields (place, text) of every docstring: modules, classes, functions, and strings under a field or constant."""
    for path, module in MODULES.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Expr) and isinstance(text := getattr(node.value, "value", None), str):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", text.strip()


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path, module in MODULES.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))

    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_docstring_opens_with_a_headless_clause() -> None:
    headless = [f"{place} {text.splitlines()[0]}" for place, text in described() if HEADLESS.match(text)]

    assert headless == []


def test_a_constant_that_bounds_something_is_a_max_or_a_min() -> None:
    bounds = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.id}"
        for path, module in MODULES.items()
        for node in ast.walk(module)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and BOUND.match(node.id)
    ]

    assert bounds == []
