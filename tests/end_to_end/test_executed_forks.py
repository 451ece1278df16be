"""Forks of a run that has finished: they wait, and a command executes them with the run's last weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Folder
from training import Training

from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

pytestmark = pytest.mark.slow


async def test_forks_of_a_finished_run_are_executed_by_its_last_checkpoint(folder: Folder, model: Path) -> None:
    training = Training(folder, model)
    assert await training.ended(training.start("--set", "eval.every=0", "--set", "trainer.steps=1")) == 0, (
        training.output
    )
    at = ("--store", training.store)
    nothing = folder.run("rollouts", "execute", training.run_id, *at)
    assert (nothing.returncode, "no rollout waits" in nothing.stderr) == (1, True)
    async with open_store(training.store) as store:
        before = await store.count(training.run_id)
        origin = next(
            one for one in await store.rollouts(RolloutQuery(run_id=training.run_id, mode="train")) if one.calls > 1
        )
        versions = await store.resources(training.run_id)
    made = folder.run("rollouts", "fork", origin.id, "--calls", "1", "--count", "2", *at)
    assert f"agl rollouts execute {training.run_id}" in made.stderr
    executed = folder.run("rollouts", "execute", training.run_id, *at)
    assert executed.returncode == 0, executed.stderr
    ended = [line.split()[:2] for line in executed.stdout.splitlines()[-2:]]
    assert ended == [[fork, "succeeded"] for fork in made.stdout.split()]
    async with open_store(training.store) as store:
        calls = await store.calls(made.stdout.split())
        first = (await store.calls([origin.id]))[0]
        assert [one.replayed_id for one in calls if one.replayed_id] == [first.id] * 2
        sampled = {span.version for one in calls if not one.replayed_id for span in one.versions}
        assert sampled == {max(one.version for one in await store.resources(training.run_id) if one.kind == "policy")}
        assert min(sampled) > max(one.version for one in versions)
        [run] = await store.runs(ids=[training.run_id])
        assert run.state == "finished"
        assert sum((await store.count(training.run_id)).values()) == sum(before.values()) + 2
