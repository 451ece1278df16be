import asyncio
from typing import Literal

import pytest

from agentlightning.errors import AgentError, NoCallsError
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.collect import Collector
from agentlightning.trainer.evaluate import evaluate, of_rollouts
from agentlightning.types import Finish, RetryPolicy, Rollout, RolloutState, Sampling, Worker


async def evaluated(store: LightningStore, state: Literal["succeeded", "failed"]) -> float:
    """Held-out success over two tasks whose agents make no call and end in `state`."""

    async def work() -> None:
        worker = Worker(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)
        for claim in await store.claim(worker, limit=2, wait_s=10):
            await store.finish([Finish(lease=claim.lease, state=state, error="boom")])

    await store.create_run("test", {}, "run")
    working = asyncio.create_task(work())
    try:
        return await evaluate(
            Collector(store, "run"),
            "run",
            [{"n": 1}, {"n": 2}],
            step=0,
            kind="greedy",
            max_tokens=None,
            retry=RetryPolicy(),
        )
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
    return Rollout(
        id="r",
        run_id="run",
        task={},
        group_id="g",
        replica=0,
        mode="eval",
        step=0,
        sampling=Sampling(),
        retry=RetryPolicy(),
        priority=1,
        state=state,
        attempt=1,
        lost=0,
        created_ns=0,
        reward=reward,
        calls=calls,
    )


def test_an_evaluation_says_how_many_did_better_than_the_worst_and_worse_than_the_best() -> None:
    found = of_rollouts([rollout(1.0), rollout(0.0), rollout(0.0, calls=6), rollout(None, calls=0, state="failed")])
    assert found.metrics("heldout_sampled") == {
        "heldout_sampled": 0.25,
        "heldout_sampled_above_least": 0.25,
        "heldout_sampled_below_best": 0.75,
        "heldout_sampled_turns": 2.5,
        "heldout_sampled_failed": 1.0,
    }


def test_where_all_tasks_earn_the_same_none_did_better_or_worse() -> None:
    found = of_rollouts([rollout(0.5), rollout(0.5)])
    assert (found.above_least, found.below_best) == (0.0, 0.0)
