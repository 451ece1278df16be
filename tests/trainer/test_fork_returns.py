"""Forks of a step's rollouts: enqueued once whatever happens, waited for, and read for what they are worth."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from loop_doubles import (
    EVERY,
    GROUP,
    STEPS,
    TASKS,
    WORKER,
    RememberingEngine,
    agents,
    answer,
    killed_and_resumed,
    loop,
)

from agentlightning.adapters.trajectories import trajectories
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.settings import NamedPart
from agentlightning.records import Claim, NewRollout, Resource, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.credit_inputs import CreditInputReader, ForkReturns
from agentlightning.trainer.scheduler import RolloutCollector
from agentlightning.training_types import Trajectory

CALLS, FORKS = 2, 2
FORKED = LightningRL(group_size=GROUP, minibatches=1, credit=NamedPart(type="forked", forks=FORKS, calls=1))


def reward_of(claim: Claim) -> float:
    """By task, place and fork alone: ids of rollouts are others in every run."""
    fork = claim.rollout.fork
    text = f"{claim.rollout.task} {claim.rollout.replica} {claim.rollout.step} {fork and fork.calls}"
    return float(hashlib.md5(text.encode()).digest()[0] % 2)


async def forks_of_run(store: LightningStore, run: str) -> list[Rollout]:
    return [one for one in await store.rollouts(RolloutQuery(run_id=run)) if one.fork is not None]


async def test_forks_of_a_step_are_in_no_batch_and_no_evaluation_and_change_what_is_learned(
    store: LightningStore, tmp_path: Path
) -> None:
    engine, plain = RememberingEngine(), RememberingEngine()
    async with agents(store, CALLS, reward_of=reward_of):
        await loop(store, engine, tmp_path, algorithm=FORKED).run(resume=False)
    await store.create_run("test", {}, "plain")
    async with agents(store, CALLS, "plain", reward_of=reward_of):
        await loop(store, plain, tmp_path, "plain", algorithm=replace(FORKED, credit="uniform")).run(resume=False)
    forks = await forks_of_run(store, "run")
    steps = await store.steps("run")
    assert Counter(one.step for one in forks) == dict.fromkeys(range(1, STEPS + 1), TASKS * GROUP * FORKS)
    assert {(one.mode, one.outcome) for one in forks} == {("eval", None)}
    consumed = [one.rollout_id for step in steps for one in step.consumed]
    assert len(consumed) == STEPS * TASKS * GROUP
    assert not {one.id for one in forks} & {*consumed, *engine.learned}
    for name in ("train/reward_mean", "rollout/count", "cost/sampled_tokens", "eval/greedy/tasks"):
        both = [[one.value for one in await store.metrics(run, name)] for run in ("run", "plain")]
        assert both[0] == both[1]
        assert both[0]
    counts = [one.value for one in await store.metrics("run", "forks/count")]
    tokens = [one.value for one in await store.metrics("run", "cost/fork_sampled_tokens")]
    assert counts == [float(TASKS * GROUP * FORKS)] * STEPS
    assert tokens == [2.0 * count for count in counts]  # the second call of each, of two tokens
    assert [one.value for one in await store.metrics("run", "forks/replay_ended_share")] == [0.0] * STEPS
    assert engine.updates != plain.updates


@EVERY
async def test_a_run_killed_at_any_verb_enqueues_no_fork_twice_and_ends_as_one_that_was_not(
    store: LightningStore, tmp_path: Path, every: int
) -> None:
    whole = RememberingEngine()
    async with agents(store, CALLS, reward_of=reward_of):
        await loop(store, whole, tmp_path, algorithm=FORKED).run(resume=False)
    runs = killed_and_resumed(
        store,
        3 * every,
        lambda *made: loop(*made[:2], tmp_path, made[2], algorithm=FORKED),
        lambda run: agents(store, CALLS, run, reward_of=reward_of),
    )
    async for run, engine in runs:
        assert engine.updates == whole.updates, run
        assert len(await forks_of_run(store, run)) == STEPS * TASKS * GROUP * FORKS, run


async def a_group(store: LightningStore) -> list[Trajectory]:
    """A group of two rollouts of two calls, with rewards 1 and 0."""
    await store.put_resources([Resource(run_id="run", name="default", kind="policy", value={"model": "m"})])
    pair = [NewRollout(run_id="run", task={}, group_id="train:1:0", replica=each, step=1) for each in (0, 1)]
    ids = [one.id for one in await store.enqueue(pair)]
    for claim in await store.claim(WORKER, limit=2):
        await answer(store, claim, 2, 1.0 - claim.rollout.replica)
    done = await store.rollouts(RolloutQuery(ids=ids))
    return trajectories(done, await store.calls(ids), await store.rewards(ids))[0]


async def sampled(
    store: LightningStore, group: list[Trajectory], on_failure: Literal["drop", "zero"] = "drop", **given: Any
) -> ForkReturns:
    reader = CreditInputReader(
        algorithm=given.get("algorithm", FORKED),
        store=store,
        run_id="run",
        folder=Path(),
        collector=given.get("collector", RolloutCollector(store, "run")),
        on_failure=on_failure,
    )
    return await reader.fork_returns(1, [group])


async def finish_forks(store: LightningStore, how: str) -> None:
    """Both forks of each rollout finish: the first well, with reward 1, the second as `how` says."""
    for claim in await store.claim(WORKER, limit=4, wait_s=10):
        second = claim.rollout.replica == 1
        if second and how == "ended":  # its agent asked something else: nothing was replayed
            claim = replace(claim, rollout=replace(claim.rollout, fork=None))
        await answer(store, claim, 2, 1.0, failed=second and how == "failed")


@pytest.mark.parametrize(
    ("how", "on_failure", "returns"),
    [
        ("well", "drop", [1.0, 1.0]),
        ("ended", "zero", [1.0]),
        ("failed", "drop", [1.0]),
        ("failed", "zero", [1.0, 0.0]),
    ],
)
async def test_a_fork_whose_replay_ended_is_no_evidence_and_one_that_failed_counts_as_the_run_counts_failures(
    store: LightningStore, how: str, on_failure: Literal["drop", "zero"], returns: list[float]
) -> None:
    group = await a_group(store)
    nothing = await sampled(store, group, collector=None)
    assert (dict(nothing.returns), nothing.metrics["forks/count"]) == ({}, 0.0)
    assert await forks_of_run(store, "run") == []
    found, _ = await asyncio.gather(sampled(store, group, on_failure), finish_forks(store, how))
    assert found.returns == {one.rollout_id: {one.transitions[1].call_id: returns} for one in group}
    assert found.metrics["forks/count"] == 4.0
    assert found.metrics["forks/replay_ended_share"] == (0.5 if how == "ended" else 0.0)
    assert found.metrics["forks/failed"] == (2.0 if how == "failed" else 0.0)
    assert (await sampled(store, group, on_failure, collector=None)).returns == found.returns


async def test_forks_are_found_again_whatever_else_is_recorded_of_what_they_continue(store: LightningStore) -> None:
    group = await a_group(store)
    found, _ = await asyncio.gather(sampled(store, group), finish_forks(store, "well"))
    for one in group:  # as a gateway may find out late
        await store.mark_delivered(one.rollout_id, 1, [one.transitions[0].call_id], False)
    assert await asyncio.wait_for(sampled(store, group), 10) == found
