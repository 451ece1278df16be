"""Makes stored runs for tests: finished rollouts with the rewards and lengths that a test asks for, without any training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import build
from agentlightning.config.run import parse_config, run_record
from agentlightning.records import (
    JSON,
    Call,
    Finish,
    Metric,
    Mode,
    NewRollout,
    Reward,
    Sampling,
    WorkerStatus,
)
from agentlightning.store.base import LightningStore
from agentlightning.store.forks import new_forks


@dataclass(frozen=True, kw_only=True)
class Earned:
    """One rollout to make."""

    group: str
    reward: float | None
    replica: int = 0
    task: JSON | None = None
    """None: the group's name."""
    named: Mapping[str, float] = field(default_factory=dict)
    """Further final rewards."""
    calls: Sequence[int] = (2,)
    """Sampled tokens of each call."""
    step_rewards: Mapping[int, float] = field(default_factory=dict)
    """By place of the call, from 0."""


def record(**tables: Mapping[str, Any]) -> JSON:
    """A configuration as a store keeps it."""
    table: dict[str, Any] = {
        "model": {"path": "m"},
        "agent": {"run": "agent.py:solve"},
        "data": {"train": "tasks.jsonl", "val": "held-out.jsonl"},
    }
    for name, values in tables.items():
        table[name] = {**table.get(name, {}), **values}
    return run_record(parse_config(table))


async def add_rollouts(
    store: LightningStore, run: str, step: int, earned: Sequence[Earned], mode: Mode = "train"
) -> list[str]:
    """Finished rollouts of a step, in this order; ids. Those of an evaluation are greedy."""
    queued = await store.enqueue(
        [
            NewRollout(
                run_id=run,
                task={"task": one.group} if one.task is None else one.task,
                group_id=f"{step} {one.group}",
                replica=one.replica,
                mode=mode,
                step=step,
                sampling=Sampling(temperature=0.0 if mode == "eval" else 1.0),
            )
            for one in earned
        ]
    )
    worker = WorkerStatus(id="w", run_id=run, host="h", pid=1, running=0, seen_ns=0)
    claims = {claim.rollout.id: claim for claim in await store.claim(worker, limit=len(earned))}
    for rollout, one in zip(queued, earned, strict=True):
        await store.append_calls([_call(run, rollout.id, place, length) for place, length in enumerate(one.calls)])
        finals = {**one.named, **({} if one.reward is None else {"reward": one.reward})}
        rewards = [
            *(_reward(run, rollout.id, "reward", value, place) for place, value in one.step_rewards.items()),
            *(_reward(run, rollout.id, name, value) for name, value in finals.items()),
        ]
        state = "succeeded" if one.reward is not None else "failed"
        await store.finish([Finish(lease=claims[rollout.id].lease, state=state, rewards=tuple(rewards))])
    return [rollout.id for rollout in queued]


async def add_fork(store: LightningStore, rollout_id: str, reward: float) -> None:
    """A finished rollout that somebody forked from this one, to see what follows."""
    [fork] = await store.enqueue(await new_forks(store, rollout_id, 0))
    [claim] = await store.claim(WorkerStatus(id="w", run_id=fork.run_id, host="h", pid=1, running=0, seen_ns=0))
    await store.finish(
        [Finish(lease=claim.lease, state="succeeded", rewards=(_reward(fork.run_id, fork.id, "reward", reward),))]
    )


async def log(store: LightningStore, run: str, curves: Mapping[str, Mapping[int, float]]) -> None:
    """Metrics by name and step, and the last step in the summary."""
    await store.log_metrics(
        [
            Metric(run_id=run, step=step, name=name, value=value)
            for name, curve in curves.items()
            for step, value in curve.items()
        ]
    )
    await store.update_run(run, summary={"step": max(step for curve in curves.values() for step in curve)})


def _call(run: str, rollout: str, place: int, length: int) -> Call:
    return build.call(
        id=f"{rollout}-{place}",
        run_id=run,
        rollout_id=rollout,
        suffix_ids=[1, place],
        sampled_ids=[3] * length,
        messages=[{"role": "user", "content": f"question {place}"}],
        completion={"role": "assistant", "content": f"answer {place} " + "word " * length},
        started_ns=place * 1_000_000_000,
        finished_ns=place * 1_000_000_000 + 500_000_000,
    )


def _reward(run: str, rollout: str, name: str, value: float, call: int | None = None) -> Reward:
    call_id = None if call is None else f"{rollout}-{call}"
    given = {"run_id": run, "rollout_id": rollout, "call_id": call_id, "source": "function"}
    return build.reward(value=value, id=f"{rollout}-{name}-{call}", name=name, **given)
