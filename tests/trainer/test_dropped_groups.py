"""A group whose rollout something else than its agent failed: it is dropped whole, and said, and another is sampled."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from loop_doubles import (
    EVERY,
    GROUP,
    STEPS,
    TASKS,
    Noting,
    RememberingEngine,
    agents,
    answer,
    killed_and_resumed,
    loop,
    reward_of,
    working,
)

from agentlightning.errors import AgentError
from agentlightning.records import Cause, Claim, Finish
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.evaluate import summarize
from build import rollout

BAD = ("train:2:0", 1)
"""A rollout of the first group of the second step."""


def failing(store: LightningStore, cause: Cause, run: str = "run") -> AbstractAsyncContextManager[None]:
    """Agents of which that of the rollout BAD never comes to an end that says anything about the policy."""

    async def work(claim: Claim, waiting: asyncio.TaskGroup) -> None:
        if (claim.rollout.group_id, claim.rollout.replica) == BAD:
            state = "lost" if cause == "infra" else "failed"
            await store.finish([Finish(lease=claim.lease, state=state, error="it broke", cause=cause)])
        else:
            await answer(store, claim, 1, reward_of(claim))

    return working(store, run, work)


@pytest.mark.parametrize(("cause", "tries"), [("infra", 5), ("verifier", 2)])
async def test_a_group_with_a_rollout_that_was_never_judged_is_dropped_and_replaced(
    store: LightningStore, tmp_path: Path, cause: Cause, tries: int
) -> None:
    training, progress = loop(store, RememberingEngine(), tmp_path, val=[]), Noting()
    training.planner = replace(training.planner, progress=progress)
    async with failing(store, cause):
        assert await training.run(resume=False) == STEPS
    _, second, _ = await store.steps("run")
    outcomes = {one.rollout_id: one.outcome for one in second.consumed}
    found = {one.id: one for one in await store.rollouts(RolloutQuery(ids=list(outcomes)))}
    dropped = [key for key, outcome in outcomes.items() if outcome == "dropped"]
    assert [(found[key].group_id, found[key].replica) for key in dropped] == [(BAD[0], 0), BAD]
    assert found[dropped[1]].attempt == tries
    assert len(outcomes) == (TASKS + 1) * GROUP
    [note] = [note for note in progress.notes if "left out" in note]
    assert note == (
        "1 group is left out: after all attempts, not the agent but something else failed 1 of their rollouts "
        f"({cause} 1), the first with: it broke"
    )
    metrics = {one.name: one.value for one in await store.metrics("run") if one.step == 2}
    assert metrics["rollout/dropped_groups"] == metrics["rollout/resampled_groups"] == 1
    ended = (TASKS + 1) * GROUP - 1 + tries
    assert metrics[f"rollout/cause/{cause}"] == tries / ended
    assert metrics["rollout/cause/policy"] == 1 - tries / ended


@EVERY
async def test_a_run_that_is_killed_over_a_dropped_group_ends_as_if_it_never_was(
    store: LightningStore, tmp_path: Path, every: int
) -> None:
    whole = RememberingEngine()
    async with failing(store, "verifier"):
        await loop(store, whole, tmp_path / "whole", val=[]).run(resume=False)
    runs = killed_and_resumed(
        store,
        4 * every,
        lambda *made: loop(*made[:2], tmp_path, made[2], []),
        lambda run: failing(store, "verifier", run),
    )
    async for run, engine in runs:
        assert engine.updates == whole.updates, run


async def test_an_agent_that_gives_up_still_counts_as_zero_and_keeps_its_group(
    store: LightningStore, tmp_path: Path
) -> None:
    async with agents(store, broken=True):
        with pytest.raises(AgentError, match="all 4 rollouts of the step failed, the first with: boom"):
            await loop(store, RememberingEngine(), tmp_path, val=[], on_failure="zero").run(resume=False)


def test_an_evaluation_leaves_out_what_was_never_judged() -> None:
    solved = rollout("a", state="succeeded", reward=1.0, cause="policy")
    lost = rollout("b", state="failed", reward=None, cause="infra")
    gave_up = rollout("c", state="failed", reward=None, cause="agent")
    found = summarize([solved, lost, gave_up])
    assert (found["tasks"], found["reward_mean"], found["failed"], found["dropped"]) == (2.0, 0.5, 1.0, 1.0)
    assert "dropped" not in summarize([solved, gave_up])
