"""Evaluate: held-out success of a policy, greedy and at temperature 1, or of an external model, as the agent asks it.

Evaluation rollouts are ordinary rollouts of mode `eval`: the gateway samples them as their `sampling` says, whatever the
agent asks for, and no training step can consume them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import count
from typing import Literal

from agentlightning.engines.base import Metrics
from agentlightning.errors import AgentError
from agentlightning.records import JSON, NewRollout, RetryPolicy, Rollout, Sampling
from agentlightning.store.base import LightningStore
from agentlightning.trainer.scheduler import RolloutCollector, check_calls_recorded, nothing_to_learn

SUCCESS = "success"
"""The reward that says whether a task was solved, where the reward itself is partial credit."""
Kind = Literal["greedy", "sampled", "as_asked"]
TEMPERATURES: dict[Kind, float] = {"greedy": 0.0, "sampled": 1.0}
"""Of the kinds for which the gateway has one. It changes no call to an external model: those are sampled as_asked."""


async def run_held_out(
    collector: RolloutCollector,
    rows: Sequence[JSON],
    *,
    step: int,
    kind: Kind,
    max_tokens: int | None,
    retry: RetryPolicy,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Rollout]:
    """One finished rollout per row.

    Raises NoCallsError where no rollout reached the gateway, AgentError where every one failed: a 0 would look like a
    result.
    """
    before, rollouts = await collector.begin(), list[Rollout]()
    for replica in count():
        rollouts = await collector.collect(
            [
                NewRollout(
                    run_id=collector.run_id,
                    task=row,
                    group_id=f"eval:{step}:{kind}:{position}",
                    replica=replica,
                    mode="eval",
                    step=step,
                    sampling=Sampling(temperature=TEMPERATURES.get(kind, 1.0), max_tokens=max_tokens),
                    retry=retry,
                    priority=1,
                )
                for position, row in enumerate(rows)
            ],
            on_progress,
        )
        # An evaluation without a result ended the process before: the one that resumes makes another, as further replicas.
        if not nothing_to_learn(rollouts) or any((one.finished_seq or 0) > before for one in rollouts):
            break
    if all(rollout.state != "succeeded" for rollout in rollouts):
        raise AgentError(f"all {len(rollouts)} rollouts of the evaluation failed, the first with: {rollouts[0].error}")
    check_calls_recorded(rollouts)
    return rollouts


async def success_metrics(store: LightningStore, rollouts: Sequence[Rollout]) -> Metrics:
    """The share of finished rollouts that were solved, by the reward of the name `success` that an agent or environment
    records beside the reward; a rollout without one counts as 0, one
    that was not judged not at all. Empty where none has one."""
    solved = await successes(store, rollouts)
    judged = sum(rollout.judged for rollout in rollouts)
    return {"success_mean": sum(solved.values()) / judged} if solved else {}


async def successes(store: LightningStore, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The reward of the name `success` of each rollout that recorded one, by rollout."""
    attempts = {rollout.id: rollout.attempt for rollout in rollouts if rollout.state == "succeeded"}
    return {
        reward.rollout_id: reward.value
        for reward in await store.rewards(list(attempts))
        if reward.name == SUCCESS and reward.call_id is None and reward.attempt == attempts[reward.rollout_id]
    }


def summarize(rollouts: Sequence[Rollout]) -> Metrics:
    """Numbers of an evaluation's finished rollouts, by the last parts of their paths; a rollout that failed or has no reward
    counts as 0, one that was not judged not at all. Twice reward_stderr is what chance does to the mean."""
    dropped, rollouts = len(rollouts), [rollout for rollout in rollouts if rollout.judged]
    dropped -= len(rollouts)
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    tasks = len(rollouts)
    return {
        "tasks": float(tasks),
        "reward_mean": sum(rewards) / tasks,
        "reward_stderr": statistics.stdev(rewards) / math.sqrt(tasks) if tasks > 1 else 0.0,
        "share_above_min": sum(reward > min(rewards) for reward in rewards) / tasks,
        "share_below_max": sum(reward < max(rewards) for reward in rewards) / tasks,
        "turns": sum(rollout.calls for rollout in rollouts) / tasks,
        "failed": float(sum(rollout.state != "succeeded" for rollout in rollouts)),
    } | ({"dropped": float(dropped)} if dropped else {})
