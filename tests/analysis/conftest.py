"""A run of three steps that is made in a second, in an SQLite file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import build
from agentlightning.records import Call, Claim, Finish, Metric, NewRollout, Reward, WorkerStatus
from agentlightning.store.sql.store import SqlLightningStore


def a_call(claim: Claim, number: int, question: str, completion: str) -> Call:
    logits = {"logit_bias": {"5": 2.0}}
    return build.call(
        claim,
        f"{claim.rollout.id}-{number}",
        parent_id=f"{claim.rollout.id}-{number - 1}" if number else None,
        sampled_ids=[3],
        messages=[{"role": "user", "content": question}],
        completion={"role": "assistant", "content": completion},
        decoding={"grammar": {"kind": "choice", "lark": "start: A"}, "forced": [[0, 1]], "logits": logits},
        started_ns=0,
        finished_ns=number,
    )


def a_reward(claim: Claim, value: float, name: str = "reward") -> Reward:
    return build.reward(claim, value, f"{claim.rollout.id}-{name}", name=name, source="function")


async def make_run(url: str) -> None:
    """Run "tour": in each of steps 1 to 3 two rollouts, of which the second fails; one evaluation."""
    async with SqlLightningStore(url) as store:
        await store.create_run("tour", {}, "tour")
        for step in (1, 2, 3):
            queued = [NewRollout(run_id="tour", task={"n": n}, group_id=f"{step}-{n}", step=step) for n in range(2)]
            if step == 3:
                queued.append(NewRollout(run_id="tour", task={"n": 9}, group_id="eval", step=3, mode="eval"))
            await store.enqueue(queued)
            worker = WorkerStatus(id="w", run_id="tour", host="h", pid=1, running=0, seen_ns=0)
            for claim in await store.claim(worker, limit=8):
                value = 0.1 if claim.rollout.task["n"] == 1 else 1.0
                await store.append_calls([a_call(claim, 0, "capital of Norway?", "Let me think")])
                await store.append_calls([a_call(claim, 1, "well?", "<b>Oslo</b>" if value == 1.0 else "Bergen")])
                rewards = (a_reward(claim, value / 2, "style"), a_reward(claim, value))
                await store.finish([Finish(lease=claim.lease, state="succeeded", rewards=rewards)])
            await store.log_metrics(
                [Metric(run_id="tour", step=step, name="train/reward_mean", value=0.5 + step / 10)]
                + [Metric(run_id="tour", step=step, name="policy/entropy", value=1.0)] * (step > 1)
            )


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """The URL of a store that has the run "tour"."""
    url = f"sqlite:///{tmp_path / 'agl.db'}"
    asyncio.run(make_run(url))
    return url
