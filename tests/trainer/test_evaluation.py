import asyncio
from typing import Literal

import pytest

from agentlightning.errors import AgentError, NoCallsError
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.collect import Collector
from agentlightning.trainer.evaluate import evaluate
from agentlightning.types import Finish, RetryPolicy, Worker


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
