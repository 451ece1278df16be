"""How the demo trains on its tasks."""

from __future__ import annotations

from pathlib import Path

from agentlightning.demo.training import configure
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import load_tasks


def test_the_sql_demo_has_a_row_for_each_of_its_at_most_8192_rollouts(tmp_path: Path) -> None:
    config = configure("sql", 0, RunFolder(tmp_path, "run"), tmp_path, "memory://", random_reward=False)
    groups = config.trainer.steps * config.trainer.tasks_per_step
    assert groups == len(load_tasks(config.data.train))
    assert groups * config.algorithm["group_size"] <= 8192
