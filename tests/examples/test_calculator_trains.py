"""The calculator example end to end: AutoGen agents, real word problems, the whole system. Learning takes longer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("AGL_DATA" not in os.environ, reason="AGL_DATA names no data"),
]


def test_autogen_agents_train_with_parsed_tool_calls_and_without_a_fork(tmp_path: Path) -> None:
    def run(*command: str) -> None:
        subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, capture_output=True, timeout=500)

    run(str(EXAMPLE / "warm_start.py"), "--seed", "0", "--to", "model", "--epochs", "6")
    run(
        *("-m", "agentlightning", "train", str(EXAMPLE / "train.toml"), "--store", f"sqlite:///{tmp_path}/agl.db"),
        *("--set", "model.path=model", "--set", "trainer.steps=3", "--set", "eval.tasks=50"),
    )
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["forked_calls"] == 0 and row["failed"] == 0 for row in steps)
    assert all(row["turns"] > 1.5 for row in steps), "the calculator was called"
