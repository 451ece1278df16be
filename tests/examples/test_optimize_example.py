"""The example of a LangGraph agent over a hosted model, in both ways in which its prompt is a template."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "optimize"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The example beside its stand-in, which runs at a free port."""
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    subprocess.run([sys.executable, "orders.py"], cwd=tmp_path, check=True)
    (tmp_path / "blocked" / "torch").mkdir(parents=True)
    (tmp_path / "blocked" / "torch" / "__init__.py").write_text("raise ImportError('no torch here')")
    command = [sys.executable, "stand_in.py", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as stand_in:
        assert stand_in.stdout is not None
        url = stand_in.stdout.readline().split()[-1]
        for name in ("template.toml", "rule.toml"):
            text = (tmp_path / name).read_text()
            (tmp_path / name).write_text(text.replace("http://127.0.0.1:8099/v1", url))
        yield tmp_path
        stand_in.terminate()


def agl(folder: Path, *words: str) -> Any:
    """The last line that a command prints without torch, which is JSON."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "blocked")}
    command = [sys.executable, "-m", "agentlightning", *words, "--store", f"sqlite:///{folder}/agl.db"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["template.toml", pytest.param("rule.toml", marks=pytest.mark.long)])
def test_a_search_finds_the_prompt_under_which_the_agent_succeeds(folder: Path, name: str) -> None:
    found = agl(folder, "optimize", name, "--json")
    assert (found["finished"], found["before"], found["after"]) == (True, 0.0, 1.0)
    assert "Look up the order" in found["texts"]["system"]
    assert "number alone" in found["texts"]["system"]
    tested = agl(folder, "prompts", "test", found["run_id"], "system@1", "system", "--json")
    assert [one["reward_mean"] for one in tested["figures"]] == [0.0, 1.0]
