"""The check whose tries a run takes as known before its first step."""

from __future__ import annotations

import pytest

from agentlightning.records import JSON
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.probe import TAKEN, probe_tries
from agentlightning.trainer.serving import CHECK


def settings(folder: str, model: str = "m") -> JSON:
    """Of an environment: every run keeps its tasks in a folder of its own."""
    return {
        "model": {"path": model},
        "agent": {"run": "env:textarena:Game-v0"},
        "data": {"train": f"/runs/{folder}/env-train.jsonl"},
    }


@pytest.mark.parametrize(("model", "taken"), [("m", "check"), ("another", "")])
async def test_a_run_takes_the_check_of_its_model_and_agent_wherever_its_tasks_lie(model: str, taken: str) -> None:
    async with InMemoryLightningStore() as store:
        await store.create_run(CHECK, settings("check", model), "check")
        await store.create_run("run", settings("run"), "run")
        assert await probe_tries(store, "run") == []
        (run,) = [one for one in await store.runs() if one.id == "run"]
        assert run.summary[TAKEN] == taken
