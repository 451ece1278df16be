"""Evaluate: held-out success of a policy, greedy and at temperature 1, or of an external model, as the agent asks it.

Evaluation rollouts are ordinary rollouts of mode `eval`: the gateway samples them as their `sampling` says, whatever the
agent asks for, and no training step can consume them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Literal

from agentlightning.errors import AgentError
from agentlightning.records import JSON, NewRollout, RetryPolicy, Rollout, Sampling
from agentlightning.trainer.scheduler import RolloutCollector, check_calls_recorded, nothing_to_learn

Kind = Literal["greedy", "sampled", "as_asked"]
TEMPERATURES: dict[Kind, float] = {"greedy": 0.0, "sampled": 1.0}
"""Of the kinds for which the gateway has one. It changes no call to an external model: those are sampled as_asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Numbers of one evaluation."""

    tasks: float
    """Tasks it rests on."""
    reward_mean: float
    """Mean final reward."""
    reward_stderr: float
    """Standard error of that mean: twice it is what chance does to it."""
    share_above_min: float
    """Share of tasks that earned more than the one that earned least: whatever the rewards' scale, few mean that hardly
    anything succeeds."""
    share_below_max: float
    """Share of tasks that earned less than the best: few mean that hardly anything is left to learn."""
    turns: float
    """Calls a rollout."""
    failed: float
    """Rollouts that failed."""

    def metrics(self, name: str) -> dict[str, float]:
        """Metrics by path, under `name`."""
        return {f"{name}/{key}": value for key, value in asdict(self).items()}


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


def summarize(rollouts: Sequence[Rollout]) -> Evaluation:
    """Metrics of an evaluation's finished rollouts; one that failed or has no reward counts as 0."""
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    tasks = len(rollouts)
    return Evaluation(
        tasks=float(tasks),
        reward_mean=sum(rewards) / tasks,
        reward_stderr=statistics.stdev(rewards) / math.sqrt(tasks) if tasks > 1 else 0.0,
        share_above_min=sum(reward > min(rewards) for reward in rewards) / tasks,
        share_below_max=sum(reward < max(rewards) for reward in rewards) / tasks,
        turns=sum(rollout.calls for rollout in rollouts) / tasks,
        failed=float(sum(rollout.state != "succeeded" for rollout in rollouts)),
    )
