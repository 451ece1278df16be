"""Statistics of a training step: rewards, groups with a signal, tokens.

LightningRL reports them with its plan. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import compress

from agentlightning.records import Outcome
from agentlightning.training_types import Trajectory


def step_stats(groups: Sequence[Sequence[Trajectory]], trained: Sequence[Trajectory]) -> dict[str, float]:
    """The statistics of the usable groups and of the trajectories trained on; see `UpdatePlan.stats`."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = [trajectory.reward for trajectory in trajectories]
    earned = [{trajectory.reward for trajectory in group} for group in groups if group]
    least, best = min(rewards, default=0.0), max(rewards, default=0.0)
    all_same_is_good = best > 0.0  # where every rollout of the step earns the same, there is nothing else to go by
    alike = [next(iter(values)) for values in earned if len(values) == 1]
    solved = sum(value == best and (best > least or all_same_is_good) for value in alike)
    unsolved = sum(value == least and (best > least or not all_same_is_good) for value in alike)
    count = max(1, len(trajectories))
    names = sorted({name for trajectory in trajectories for name in trajectory.rewards} - {"reward"})
    named = {name: [one.rewards[name] for one in trajectories if name in one.rewards] for name in names}
    return {
        "reward_mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "groups_with_signal": 1.0 - len(alike) / len(earned) if earned else 0.0,
        "solved_groups": solved / max(1, len(earned)),
        "unsolved_groups": unsolved / max(1, len(earned)),
        "turns": sum(len(trajectory.transitions) for trajectory in trajectories) / count,
        "tokens_sampled": float(sum(map(_sampled, trajectories))),
        "tokens_trained": float(sum(call.trained_tokens for trajectory in trained for call in trajectory.transitions)),
        "zero_variance": 1.0 - len(trained) / count if trajectories else 0.0,
    } | {f"rewards/{name}/mean": statistics.fmean(values) for name, values in named.items()}


def without_signal(groups: Sequence[Sequence[Trajectory]], outcomes: Mapping[str, Outcome]) -> list[str]:
    """The ids of the groups none of whose rollouts is trained on."""
    return [
        group[0].group_id
        for group in groups
        if group and all(outcomes[trajectory.rollout_id] != "trained" for trajectory in group)
    ]


def _sampled(trajectory: Trajectory) -> int:
    return sum(len(transition.sampled_ids) for transition in trajectory.transitions)


def any_signal(trajectory: Trajectory, advantages: Sequence[float | Sequence[float]]) -> bool:
    """True where the advantage of a token that is trained is not 0."""
    return any(
        call.trained_tokens and (one if isinstance(one, int | float) else any(compress(one, call.mask)))
        for call, one in zip(trajectory.transitions, advantages, strict=True)
    )
