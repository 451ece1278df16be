"""An agent that owns its tokens, as its page prints it, is trained: all its calls continue exactly, and it learns."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from training import mistaken_model

import agentlightning as agl
from agentlightning.records import Call
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

pytestmark = [pytest.mark.slow, pytest.mark.long]

PAGE = Path(__file__).parents[2] / "docs" / "apis.md"
RIGHT = {"red": "alpha", "green": "beta", "blue": "gamma", "black": "delta"}


async def recorded(store: str) -> list[Call]:
    """All calls of the only run."""
    async with open_store(store) as opened:
        [run] = await opened.runs(limit=1)
        rollouts = await opened.rollouts(RolloutQuery(run_id=run.id))
        return await opened.calls([one.id for one in rollouts])


def test_the_agent_of_the_page_learns_and_its_calls_continue_exactly(tmp_path: Path) -> None:
    [agent] = re.findall(r"```python\n# agent\.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "agent.py").write_text(agent, encoding="utf-8")
    store = f"sqlite:///{tmp_path}/agl.db"
    trainer = agl.Trainer(
        mistaken_model(tmp_path / "model", RIGHT, turns=2),
        algorithm=agl.LightningRL(group_size=8, minibatches=1),
        steps=10,
        tasks_per_step=12,
        learning_rate=2e-3,
        workers=1,
        store=store,
        runs=tmp_path / "runs",
        settings={"eval": {"sampled": False}},
    )
    tasks = [{"question": question, "answer": answer} for question, answer in RIGHT.items()]
    result = trainer.fit(f"{tmp_path}/agent.py:solve", train_dataset=tasks * 6, val_dataset=tasks)
    first, *_, last = (row for row in result.metrics if row["kind"] == "eval/greedy")
    assert first["eval/greedy/reward_mean"] < 0.5
    assert last["eval/greedy/reward_mean"] >= 0.75
    calls = asyncio.run(recorded(store))
    assert len(calls) > 100
    assert {call.protocol for call in calls} == {"tokens"}
    assert sum(call.parent_id is not None for call in calls) * 2 == len(calls)
    assert {call.fork_cause for call in calls} == {None}
