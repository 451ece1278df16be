"""Evaluate: held-out success of a policy, greedy and at temperature 1.

Evaluation rollouts are ordinary rollouts of mode `eval`: the gateway samples them as their `sampling` says, whatever the
agent asks for, and no training step can consume them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from agentlightning.errors import AgentError
from agentlightning.trainer.collect import Collector, refuse_silence
from agentlightning.types import JSON, NewRollout, RetryPolicy, Rollout, Sampling

Kind = Literal["greedy", "sampled"]
TEMPERATURES: dict[Kind, float] = {"greedy": 0.0, "sampled": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Numbers of one evaluation."""

    success: float
    """Mean final reward."""
    above_least: float
    """Share of tasks that earned more than the one that earned least: whatever the rewards' scale, few mean that hardly
    anything succeeds."""
    below_best: float
    """Share of tasks that earned less than the best: few mean that hardly anything is left to learn."""
    turns: float
    """Calls a rollout."""
    failed: float
    """Rollouts that failed."""

    def metrics(self, name: str) -> dict[str, float]:
        """As numbers of a run: the success under `name`, the others under names that begin with it."""
        values = asdict(self)
        return {name: values.pop("success")} | {f"{name}_{key}": value for key, value in values.items()}


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
    """`measure`, its success alone."""
    measured = await measure(
        collector, run_id, rows, step=step, kind=kind, max_tokens=max_tokens, retry=retry, on_progress=on_progress
    )
    return measured.success


async def measure(
    collector: Collector,
    run_id: str,
    rows: Sequence[JSON],
    *,
    step: int,
    kind: Kind,
    max_tokens: int | None,
    retry: RetryPolicy,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """What `held_out` rollouts come to; a rollout that failed or has no reward counts as 0."""
    return of_rollouts(
        await held_out(
            collector, run_id, rows, step=step, kind=kind, max_tokens=max_tokens, retry=retry, on_progress=on_progress
        )
    )


async def held_out(
    collector: Collector,
    run_id: str,
    rows: Sequence[JSON],
    *,
    step: int,
    kind: Kind,
    max_tokens: int | None,
    retry: RetryPolicy,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Rollout]:
    """One finished rollout a row.

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
    return rollouts


def of_rollouts(rollouts: Sequence[Rollout]) -> Evaluation:
    """What finished rollouts of an evaluation come to."""
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    count = len(rollouts)
    return Evaluation(
        success=sum(rewards) / count,
        above_least=sum(reward > min(rewards) for reward in rewards) / count,
        below_best=sum(reward < max(rewards) for reward in rewards) / count,
        turns=sum(rollout.calls for rollout in rollouts) / count,
        failed=float(sum(rollout.state != "succeeded" for rollout in rollouts)),
    )
