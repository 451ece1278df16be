"""What it costs to prepare a recorded call for training: from the store's rows to the minibatches of a plan."""

from __future__ import annotations

import random
import time
from dataclasses import replace

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.selection import Selection
from agentlightning.records import Call, Finish, NewRollout, Reward, Rollout, Sampling, VersionSpan, WorkerStatus
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.load_trajectories import LoadedTrajectories
from agentlightning.trainer.progress import Silent

SUFFIX, SAMPLED, VOCABULARY = 40, 40, 1000
GROUP = 4


async def prepare_ms(turns: int, calls: int, rounds: int) -> float:
    """CPU milliseconds per call, the least of `rounds`, for about `calls` calls in rollouts of so many turns."""
    rollouts = max(GROUP, calls // turns // GROUP * GROUP)
    async with InMemoryLightningStore() as store:
        await _record(store, rollouts, turns)
        found = await store.rollouts(RolloutQuery(run_id="run"))
        times = [await _prepare(store, found) for _ in range(rounds)]
    return 1000 * min(times) / (rollouts * turns)


async def _prepare(store: LightningStore, rollouts: list[Rollout]) -> float:
    started = time.process_time()
    loaded = LoadedTrajectories(
        store=store, selections={"default": Selection("default")}, on_failure="drop", progress=Silent()
    )
    await loaded.add(rollouts)
    plan = LightningRL(group_size=GROUP).plan(list(loaded.groups.values()), seed=0)
    took = time.process_time() - started
    assert sum(map(len, plan.minibatches)) == len(rollouts), "a conversation is one row"
    return took


async def _record(store: LightningStore, rollouts: int, turns: int) -> None:
    draw = random.Random(0)
    await store.create_run("prepare", {}, "run")
    new = [
        NewRollout(run_id="run", task={"n": number // GROUP}, group_id=f"g{number // GROUP}", replica=number % GROUP)
        for number in range(rollouts)
    ]
    await store.enqueue(new)
    worker = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)
    for claim in await store.claim(worker, limit=rollouts):
        rollout = claim.rollout
        calls: list[Call] = []
        length = 0
        for turn in range(turns):
            suffix, sampled = ([draw.randrange(VOCABULARY) for _ in range(count)] for count in (SUFFIX, SAMPLED))
            length += SUFFIX
            call = Call(
                id=f"{rollout.id}.{turn}",
                run_id="run",
                rollout_id=rollout.id,
                attempt=1,
                parent_id=calls[-1].id if calls else None,
                suffix_ids=suffix,
                sampled_ids=sampled,
                logprobs=[-1.0] * SAMPLED,
                versions=[VersionSpan(version=1, start=0, end=SAMPLED)],
                prompt_tokens=length,
                policy="default",
                model="m",
                protocol="chat",
                sampling=Sampling(),
                history_hash=f"h{rollout.id}{turn}",
                request_hash=f"r{rollout.id}{turn}",
                messages=[{"role": "user", "content": "what next? " * 4}],
                completion={"role": "assistant", "content": "this, then that " * 4},
            )
            length += SAMPLED
            calls.append(replace(call, started_ns=turn, finished_ns=turn + 1))
        await store.append_calls(calls)
        reward = Reward(
            id=f"{rollout.id}.reward", run_id="run", rollout_id=rollout.id, attempt=1, value=float(rollout.replica % 2)
        )
        await store.finish([Finish(lease=claim.lease, state="succeeded", rewards=(reward,))])
