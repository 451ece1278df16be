"""The benchmark of continued prompts runs and says what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def drift(*arguments: str) -> tuple[list[str], dict[str, object]]:
    """What it prints of few conversations with its own template: the table, and the last line."""
    known = {name: value for name, value in os.environ.items() if name != "AGL_DATA"}
    command = [sys.executable, "benchmarks/drift.py", "--conversations", "2", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=known, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    return table, json.loads(last)


@pytest.fixture(scope="module")
def first() -> tuple[list[str], dict[str, object]]:
    return drift("--noise", "0.2")


def test_with_the_graph_every_prompt_continues_and_without_it_most_do_not(
    first: tuple[list[str], dict[str, object]],
) -> None:
    table, figures = first
    assert len(table) == 2
    assert table[1].startswith("chatml")
    assert figures["exact_share"] == 1.0
    assert isinstance(figures["retokenised_exact_share"], float)
    assert figures["retokenised_exact_share"] < 0.5
    assert figures["forks_by_cause"] == figures["real_templates"] == {}
    assert isinstance(figures["calls"], int)
    assert 2 * 4 * 3 <= figures["calls"] <= 2 * 4 * 9
    assert isinstance(figures["plan_ms"], float)


def test_a_seed_gives_the_same_conversations_again(first: tuple[list[str], dict[str, object]]) -> None:
    _, figures = first
    again, other = (drift("--noise", "0.2", "--seed", seed)[1] for seed in ("0", "1"))
    assert {**again, "plan_ms": figures["plan_ms"]} == figures
    assert {**other, "plan_ms": figures["plan_ms"]} != figures
