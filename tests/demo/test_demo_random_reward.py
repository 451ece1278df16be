"""The random-reward control: what training rows earn says nothing, what held-out rows earn is true."""

from __future__ import annotations

from pathlib import Path

from agentlightning.demo import random_reward
from agentlightning.demo.training import configure
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import load_tasks


async def test_a_held_out_task_of_the_control_is_scored_by_its_answer(tmp_path: Path, llm):
    config = configure("lookup", 0, RunFolder(tmp_path, "run"), tmp_path, "memory://", random_reward=True)
    assert config.data.val is not None
    row = load_tasks(config.data.val)[0]
    for answer, reward in ((row["answer"], 1.0), ("wrong", 0.0)):
        llm.play(f"Answer: {answer}")
        assert await random_reward.solve(row, llm) == reward


async def test_a_training_task_of_the_control_earns_what_a_coin_says(tmp_path: Path, llm):
    config = configure("lookup", 0, RunFolder(tmp_path, "run"), tmp_path, "memory://", random_reward=True)
    row = load_tasks(config.data.train)[0]
    rewards = set()
    for _ in range(100):
        llm.play("Answer: wrong")
        rewards.add(await random_reward.solve(row, llm))
    assert rewards == {0.0, 1.0}
