import asyncio
from typing import Literal

import pytest

import build
from agentlightning.errors import AgentError, NoCallsError
from agentlightning.records import Finish, RetryPolicy, Rollout, RolloutState, WorkerStatus
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.evaluate import run_held_out, summarize
from agentlightning.trainer.scheduler import RolloutCollector


async def evaluated(store: LightningStore, state: Literal["succeeded", "failed"]) -> float:
    """Held-out success over two tasks whose agents make no call and end in `state`."""

    async def work() -> None:
        worker = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)
        for claim in await store.claim(worker, limit=2, wait_s=10):
            await store.finish([Finish(lease=claim.lease, state=state, error="boom")])

    await store.create_run("test", {}, "run")
    working = asyncio.create_task(work())
    try:
        rollouts = await run_held_out(
            RolloutCollector(store, "run"),
            [{"n": 1}, {"n": 2}],
            step=0,
            kind="greedy",
            max_tokens=None,
            retry=RetryPolicy(),
        )
        return summarize(rollouts)["reward_mean"]
    finally:
        await working


async def test_an_evaluation_in_which_every_rollout_failed_is_an_error_and_no_zero() -> None:
    async with InMemoryLightningStore() as store:
        with pytest.raises(AgentError, match="all 2 rollouts of the evaluation failed, the first with: boom"):
            await evaluated(store, "failed")


async def test_an_evaluation_without_a_model_call_names_the_likely_cause() -> None:
    async with InMemoryLightningStore() as store:
        with pytest.raises(NoCallsError, match="no model call was recorded"):
            await evaluated(store, "succeeded")


def rollout(reward: float | None, calls: int = 2, state: RolloutState = "succeeded") -> Rollout:
    return build.rollout(reward=reward, mode="eval", state=state, calls=calls)


def test_an_evaluation_says_how_many_did_better_than_the_worst_and_worse_than_the_best() -> None:
    found = summarize([rollout(1.0), rollout(0.0), rollout(0.0, calls=6), rollout(None, calls=0, state="failed")])
    assert found == {
        "tasks": 4.0,
        "reward_mean": 0.25,
        "reward_stderr": 0.25,
        "share_above_min": 0.25,
        "share_below_max": 0.75,
        "turns": 2.5,
        "failed": 1.0,
    }
