"""The retrieval example end to end: OpenAI Agents SDK, real questions and paragraphs, the whole system."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "rag"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("AGL_DATA" not in os.environ, reason="AGL_DATA names no data"),
]


def test_agents_of_the_sdk_train_with_parsed_searches_and_without_a_fork(tmp_path: Path) -> None:
    def run(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, capture_output=True, timeout=500)
        return done.stdout.decode()

    warm = json.loads(
        run(str(EXAMPLE / "warm_start.py"), "--seed", "0", "--to", "model", "--epochs", "4").splitlines()[-1]
    )
    run(
        *("-m", "agentlightning", "train", str(EXAMPLE / "train.toml"), "--store", f"sqlite:///{tmp_path}/agl.db"),
        *("--set", "model.path=model", "--set", "trainer.steps=2", "--set", "eval.sampled=false"),
    )
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["rollout/forked_calls"] == 0 and row["rollout/failed"] == 0 for row in steps)
    assert all(row["rollout/turns"] > 1.5 for row in steps), "paragraphs were searched"
    (before,) = [
        row["eval/greedy/reward_mean"] for row in rows if "eval/greedy/reward_mean" in row and row["step"] == 0
    ]
    assert before == pytest.approx(warm["held_out_greedy"], abs=0.02), (
        "the warm start's quick check is the agent's figure"
    )
