import asyncio
from typing import Literal

import pytest
from loop_doubles import working

import build
from agentlightning.errors import AgentError, NoCallsError
from agentlightning.records import Claim, Finish, RetryPolicy, Rollout, RolloutState
from agentlightning.store.base import LightningStore
from agentlightning.trainer.evaluate import run_held_out, summarize
from agentlightning.trainer.scheduler import RolloutCollector


@pytest.mark.parametrize(
    ("state", "error", "sentence"),
    [
        ("failed", AgentError, "all 2 rollouts of the evaluation failed, the first with: boom"),
        ("succeeded", NoCallsError, "no model call was recorded"),
    ],
)
async def test_an_evaluation_without_a_result_is_an_error_and_no_zero(
    store: LightningStore, state: Literal["succeeded", "failed"], error: type[Exception], sentence: str
) -> None:
    async def work(claim: Claim, _: asyncio.TaskGroup) -> None:
        await store.finish([Finish(lease=claim.lease, state=state, error="boom")])

    collector, rows = RolloutCollector(store, "run"), [{"n": 1}, {"n": 2}]
    async with working(store, "run", work):
        with pytest.raises(error, match=sentence):
            await run_held_out(collector, rows, step=0, kind="greedy", max_tokens=None, retry=RetryPolicy())


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
