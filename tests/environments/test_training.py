"""``agl train --env NAME`` as processes: two steps of a tiny model on each kind that is installed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from agentlightning.records import JSON
from agentlightning.testing.contract_model import write_contract_model

GRID = '''
"""An environment of one's own."""
import signal
from pathlib import Path

import agentlightning as agl
from agentlightning.environments.base import EpisodeResult


class Grid:
    def __init__(self, length=4):
        print("an environment prints what it likes")
        self.length = length

    def tasks(self, split, limit, seed):
        return [{"start": start} for start in range(self.length) if (start % 3 == 2) == (split == "val")][:limit]

    async def play(self, task, llm):
        client = llm.async_openai()
        messages = [{"role": "user", "content": "." * task["start"] + "x"}]
        reply = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
        return EpisodeResult(reward=len(reply.choices[0].message.content or "") / 4, success=False, metrics={"made": 1.0})

    def close(self):
        Path("closed").touch()
'''
SETTINGS = {
    "trainer.steps": "2",
    "trainer.tasks_per_step": "2",
    "algorithm.group_size": "2",
    "eval.tasks": "2",
    "model.max_tokens": "8",
    "engine.device": "cpu",
    "agent.workers": "1",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_contract_model(tmp_path_factory.mktemp("model") / "model", context=4096)


def agl(folder: Path, *arguments: str) -> str:
    """Standard output of a command, which has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, model: Path, name: str, *more: str) -> list[JSON]:
    """The metrics of two steps."""
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    agl(folder, "train", "--env", name, "--model", str(model), "--chat-template", "chatml", *settings, *more)
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    return [orjson.loads(line) for line in metrics.read_bytes().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "reasoning-gym:chain_sum?max_digits=1&max_terms=2",
        "gymnasium:FrozenLake-v1?is_slippery=false",
        "textarena:FrozenLake-v0?size=4",
    ],
)
def test_a_kind_trains_two_steps_as_typed(name: str, model: Path, tmp_path: Path) -> None:
    rows = train(tmp_path, model, name)
    assert [row["rollout/failed"] for row in rows if row["kind"] == "step"] == [0, 0]
    assert all("eval/greedy/success_mean" in row for row in rows if row["kind"] == "eval/greedy")
    (run,) = tmp_path.glob("runs/2*")
    assert len((run / "env-val.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.slow
def test_an_environment_of_ones_own_trains_is_checked_and_closed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.py").write_text(GRID)
    assert "can be trained on" in agl(tmp_path, "env", "check", "grid.py:Grid?length=8")
    rows = train(tmp_path, model, "grid.py:Grid?length=8", "--set", "env.options.length=9")
    assert [row["rollout/count"] for row in rows if row["kind"] == "step"] == [4, 4]
    assert (tmp_path / "closed").exists()


@pytest.mark.slow
def test_one_part_of_an_environment_can_be_replaced(model: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.py").write_text(GRID)
    (tmp_path / "judge.py").write_text("def reward(task, result):\n    return 3.0 + result.output['reward']\n")
    (tmp_path / "mine.jsonl").write_text('{"start": 1}\n')
    rows = train(tmp_path, model, "grid.py:Grid?length=8", "--reward", "judge.py:reward", "--val", "mine.jsonl")
    assert all(row["eval/greedy/reward_mean"] >= 3.0 for row in rows if row["kind"] == "eval/greedy")
    assert {row["eval/greedy/tasks"] for row in rows if row["kind"] == "eval/greedy"} == {1}
