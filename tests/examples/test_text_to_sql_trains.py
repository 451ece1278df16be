"""The text-to-SQL example end to end: LangGraph agents, generated databases, the whole system. It visibly learns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_to_sql"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def train(tmp_path: Path, config: str, *settings: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "agentlightning", "train", str(EXAMPLE / config), "--set", "model.path=model"]
    command += [word for setting in settings for word in ("--set", setting)]
    command += ["--store", f"sqlite:///{tmp_path}/agl.db"]
    run(tmp_path, command)
    (folder,) = (tmp_path / "runs").glob("20*")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def warm_start(tmp_path: Path, *options: str) -> None:
    run(tmp_path, [sys.executable, str(EXAMPLE / "warm_start.py"), "--to", "model", *options])


def run(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_writer_and_rewriter_are_trained_and_the_checker_is_context(tmp_path: Path) -> None:
    warm_start(tmp_path)
    rows = train(tmp_path, "train.toml", "trainer.steps=6", "eval.tasks=100", "eval.every=6")
    steps = [row for row in rows if row["kind"] == "step"]
    assert all(row["forked_calls"] == 0 and row["failed"] == 0 for row in steps)
    assert all(row["rollouts"] < row["turns"] * row["rollouts"] < row["calls"] for row in steps), "calls of the checker"
    assert all(row["tokens_trained"] < row["tokens_sampled"] for row in steps)
    before, after = (row["heldout_greedy"] for row in rows if "heldout_greedy" in row)
    assert after > before


@pytest.mark.skipif("AGL_DATA" not in os.environ, reason="AGL_DATA names no data")
def test_spider_questions_train_without_a_fork(tmp_path: Path) -> None:
    warm_start(tmp_path, "--slice", "spider", "--epochs", "4")
    rows = train(tmp_path, "spider.toml", "trainer.steps=2", "trainer.tasks_per_step=8", "eval.tasks=20")
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["forked_calls"] == 0 and row["failed"] == 0 for row in steps)
