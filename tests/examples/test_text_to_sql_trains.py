"""The text-to-SQL example end to end: LangGraph agents, generated databases, the whole system. It visibly learns. Its Spider
slice is trained in tests/benchmarks/test_learning.py, as are the other examples."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_to_sql"
SETTINGS = ("model.path=model", "trainer.steps=6", "eval.tasks=100", "eval.every=6")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_writer_and_rewriter_are_trained_and_the_checker_is_context(tmp_path: Path) -> None:
    run(tmp_path, str(EXAMPLE / "warm_start.py"), "--to", "model")
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    command = ["-m", "agentlightning", "train", str(EXAMPLE / "train.toml"), *settings]
    run(tmp_path, *command, "--store", f"sqlite:///{tmp_path}/agl.db")
    (metrics,) = (tmp_path / "runs").glob("20*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert all(row["rollout/forked_calls"] == 0 and row["rollout/failed"] == 0 for row in steps)
    assert all(
        row["rollout/count"] < row["rollout/turns"] * row["rollout/count"] < row["rollout/calls"] for row in steps
    ), "calls of the checker"
    assert all(row["train/tokens_trained"] < row["train/tokens_sampled"] for row in steps)
    before, after = (row["eval/greedy/reward_mean"] for row in rows if "eval/greedy/reward_mean" in row)
    assert after > before


def run(folder: Path, *command: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
