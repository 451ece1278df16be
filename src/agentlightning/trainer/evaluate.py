"""Evaluate: held-out success of a policy, greedy and at temperature 1.

Evaluation rollouts are ordinary rollouts of mode `eval`: the gateway samples them as their `sampling` says, whatever the
agent asks for, and no training step can consume them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from agentlightning.errors import AgentError
from agentlightning.trainer.collect import Collector, refuse_silence
from agentlightning.types import JSON, NewRollout, RetryPolicy, Sampling

Kind = Literal["greedy", "sampled"]
TEMPERATURES: dict[Kind, float] = {"greedy": 0.0, "sampled": 1.0}


async def evaluate(
    collector: Collector,
    run_id: str,
    rows: Sequence[JSON],
    *,
    step: int,
    kind: Kind,
    max_tokens: int | None,
    retry: RetryPolicy,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Mean final reward over one rollout a row; a rollout that failed or has no reward counts as 0.

    Raises NoCallsError where no rollout reached the gateway, AgentError where every one failed: a 0 would look like a
    result.
    """
    rollouts = await collector.collect(
        [
            NewRollout(
                run_id=run_id,
                task=row,
                group_id=f"eval:{step}:{kind}:{position}",
                mode="eval",
                step=step,
                sampling=Sampling(temperature=TEMPERATURES[kind], max_tokens=max_tokens),
                retry=retry,
                priority=1,
            )
            for position, row in enumerate(rows)
        ],
        on_progress,
    )
    if all(rollout.state != "succeeded" for rollout in rollouts):
        raise AgentError(f"all {len(rollouts)} rollouts of the evaluation failed, the first with: {rollouts[0].error}")
    refuse_silence(rollouts)
    return sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts)
