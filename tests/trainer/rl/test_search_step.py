"""A training step that searches for prompts: what the weights learn from it, whatever its rollouts were."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from loop_doubles import STEPS, Countdown, Crash, Crashing, RememberingEngine, agents, loop

from agentlightning.algorithms.prompts.random_search import RandomSearch
from agentlightning.records import NewRollout, Rollout, WorkerStatus
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.prompt_candidates import shared_group_id
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.collect import RolloutCollector
from agentlightning.trainer.policies import ScheduledAlgorithm
from agentlightning.trainer.rl.loop import RLLoop
from agentlightning.trainer.training_loop import SearchedStep

SEARCHED = 2


@dataclass
class Search:
    """Runs these rollouts on training tasks, two replicas of each, found again by name."""

    store: LightningStore
    tasks: int

    async def search(self, step: int) -> SearchedStep:
        new = [
            NewRollout(run_id="run", task={"n": task}, group_id=shared_group_id(step, task), replica=replica, step=step)
            for task in range(self.tasks)
            for replica in range(2)
        ]
        collector = RolloutCollector(self.store, "run")
        return SearchedStep(rollouts=await collector.collect(new) if new else [], metrics={"prompts/best": 0.0})


def searching(store: LightningStore, folder: Path, search: Search, engine: RememberingEngine) -> RLLoop:
    made = loop(store, engine, folder)
    [policy] = made.policies.values()
    rl = ScheduledAlgorithm(from_step=1, config=made.config, algorithm=policy.algorithm)
    schedule = [
        rl,
        replace(rl, from_step=SEARCHED, algorithm=RandomSearch()),
        replace(rl, from_step=SEARCHED + 1),
    ]
    made.policies = {"default": replace(policy, schedule=schedule)}
    made.planner = replace(made.planner, policies=made.policies)
    made.searches = {1: search}
    return made


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        await opened.create_run("test", {}, "run")
        yield opened


async def outcomes(store: LightningStore, step: int = SEARCHED) -> list[str | None]:
    [found] = [one for one in await store.steps("run") if one.step == step]
    assert found.state == "closed"
    return [one.outcome for one in found.consumed]


def of_search(rollout: Rollout) -> bool:
    return rollout.group_id.startswith("optimize:")


async def test_the_weights_learn_from_the_rollouts_of_a_search(store: LightningStore, tmp_path: Path) -> None:
    engine = RememberingEngine()
    async with agents(store, reward_of=lambda claim: float(claim.rollout.replica)):
        assert await searching(store, tmp_path, Search(store, tasks=2), engine).run(resume=False) == STEPS
    assert await outcomes(store) == ["trained"] * 4


async def test_a_search_without_rollouts_on_training_tasks_changes_no_weights(
    store: LightningStore, tmp_path: Path
) -> None:
    engine = RememberingEngine()
    async with agents(store, reward_of=lambda claim: float(claim.rollout.replica)):
        assert await searching(store, tmp_path, Search(store, tasks=0), engine).run(resume=False) == STEPS
    assert await outcomes(store) == []
    assert len(engine.updates) == STEPS - 1


async def test_a_search_whose_rollouts_all_failed_teaches_nothing_and_the_run_goes_on(
    store: LightningStore, tmp_path: Path
) -> None:
    engine = RememberingEngine()
    async with agents(store, refused=of_search):
        assert await searching(store, tmp_path, Search(store, tasks=2), engine).run(resume=False) == STEPS
    assert await outcomes(store) == ["invalid"] * 4


@pytest.mark.parametrize("ticks", [30, 38, 46, 54])
async def test_a_step_whose_search_taught_nothing_is_executed_again_after_a_kill(
    store: LightningStore, tmp_path: Path, ticks: int
) -> None:
    """Checkpoints are of steps 0 and 2, so that later kills execute step 2 again from its list."""
    countdown = Countdown(ticks)
    async with agents(store, refused=of_search):
        broken = Crashing(store, countdown), Crashing(RememberingEngine(), countdown)
        with pytest.raises(Crash):
            await searching(broken[0], tmp_path, Search(store, tasks=2), broken[1]).run(resume=False)
        made = searching(store, tmp_path, Search(store, tasks=2), RememberingEngine())
        assert await made.run(resume=True) == STEPS
    assert await outcomes(store) == ["invalid"] * 4


async def test_rollouts_that_a_killed_search_enqueued_and_did_not_ask_for_again_are_not_left_behind(
    store: LightningStore, tmp_path: Path
) -> None:
    [left] = await store.enqueue(
        [NewRollout(run_id="run", task={"n": 4}, group_id=shared_group_id(SEARCHED, 4), step=SEARCHED)]
    )
    held = await store.claim(WorkerStatus(id="gone", run_id="run", host="h", pid=2, running=0, seen_ns=0))
    assert [claim.rollout.id for claim in held] == [left.id]
    async with agents(store, reward_of=lambda claim: float(claim.rollout.replica)):
        await searching(store, tmp_path, Search(store, tasks=2), RememberingEngine()).run(resume=False)
    assert await outcomes(store) == ["trained"] * 4 + ["overprovisioned"]
    unconsumed = await store.rollouts(RolloutQuery(run_id="run", mode="train", unconsumed=True))
    assert unconsumed == []
