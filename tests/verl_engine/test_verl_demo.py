"""The demo on verl with two workers, as a person runs it without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verl_house import OPTIONS, PYTHON


def settings(name: str, value: Any) -> Iterator[str]:
    """Yields the settings of a table as --set takes them."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from settings(f"{name}.{key}", one)
    else:
        yield f"{name}={json.dumps(value)}"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_demo_learns_on_verl(verl_environment: None, tmp_path: Path) -> None:
    table = {"name": "verl", "options": tomllib.loads(OPTIONS.read_text())}
    table["options"] |= {"python": str(PYTHON), "trainer": {"n_gpus_per_node": 2}}
    options = [word for setting in settings("engine", table) for word in ("--set", setting)]
    command = [sys.executable, "-m", "agentlightning", "demo", "--task", "lookup", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["before_greedy"] <= 0.40
    assert figures["after_greedy"] >= 0.85
    assert figures["forked_calls"] == 0
