"""Reward of a rollout: named rewards weighed into one number, the treatment of a missing one, and a step's statistics.

A reward is not known if the rollout has none, if it is no finite number or beyond `MAX_REWARD`, or if it came after the
rollout had finished (the adapter leaves those out, so that a step that is executed again is the same step).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
from typing import Literal

from pydantic import PositiveInt

from agentlightning.algorithms.settings import AlgorithmPart
from agentlightning.records import Outcome
from agentlightning.store.rules import AIR_PREFIX, MAX_REWARD
from agentlightning.training_types import Trajectory


class TrainTruncated(AlgorithmPart):
    """Completions that ended at the limit of tokens are trained as any other."""

    type: Literal["train"] = "train"


class MaskTruncated(AlgorithmPart):
    """They are in no loss and no weight, while their rollouts are compared (Yu et al. 2025, "DAPO", section 3.4)."""

    type: Literal["mask"] = "mask"


class SoftPenalty(AlgorithmPart):
    """A reward that falls over the last tokens before the limit: 0 up to length - buffer, then linearly to -1 at length.

    Yu et al. 2025, "DAPO", equation 13 (soft overlong punishment), of a rollout's longest completion. length 100, buffer 20:
    80 tokens 0, 90 tokens -0.5, 100 tokens -1.
    """

    type: Literal["soft_penalty"] = "soft_penalty"
    length: PositiveInt
    """Tokens of a completion that has -1: the limit."""
    buffer: PositiveInt
    """Tokens before it over which the reward falls."""

    def of(self, trajectory: Trajectory) -> float:
        longest = max((len(call.sampled_ids) for call in trajectory.transitions if call.trained), default=0)
        return -min(1.0, max(0.0, (longest - self.length + self.buffer) / self.buffer))


def alike(one: float, other: float) -> bool:
    """True where two numbers are equal up to rounding: 0.1 + 0.2 and 0.3."""
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def without_rounding(values: Sequence[float]) -> list[float]:
    """The numbers, with one in place of those that are `alike`, the smallest. [0.1 + 0.2, 0.3, 1]: [0.3, 0.3, 1]."""
    found: dict[float, float] = {}
    first = math.nan
    for value in sorted(set(values)):
        first = first if alike(first, value) else value
        found[value] = first
    return [found[value] for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPolicy:
    """The rules that settle a rollout's reward."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each reward by name: the reward is their weighted sum, for final and for step rewards. Empty: the settled
    reward. Rewards of AIR (``air.RULE``), which have weights already, count once where none is given here."""
    length_penalty: SoftPenalty | None = None
    """Added to the reward of a rollout that did not fail."""

    def settle(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[list[Trajectory]], set[str]]:
        """The rollouts with known rewards, by group, and the ids of the others. Rewards equal up to rounding become equal.

        Weights {answer: 1, format: 0.2}: rewards {answer: 1, format: 0.5} make 1.1; {answer: 1} alone is not known. A call
        without a step reward earned none.
        """
        settled = [[self._weighed(one) for one in group if self._known(one)] for group in groups]
        kept = [[one for one in group if _is_finite(one)] for group in settled]
        rewards = iter(without_rounding([one.reward for group in kept for one in group]))
        kept = [[_rewarded(one, next(rewards)) for one in group] for group in kept]
        known = {one.rollout_id for group in kept for one in group}
        return kept, {one.rollout_id for group in groups for one in group} - known

    def _known(self, trajectory: Trajectory) -> bool:
        finals = {name: trajectory.rewards.get(name, math.nan) for name in self._finals}
        if trajectory.failed or not self.weights:  # a failed rollout has the reward that the run gives for it
            finals = {"reward": trajectory.reward}
        steps = [
            value
            for transition in trajectory.transitions
            for value in self._steps(transition.reward, transition.rewards).values()
        ]
        return all(abs(value) <= MAX_REWARD for value in (*finals.values(), *steps))  # not so for NaN

    def _weighed(self, trajectory: Trajectory) -> Trajectory:
        transitions = [
            replace(transition, reward=self._sum(self._steps(transition.reward, transition.rewards)))
            for transition in trajectory.transitions
        ]
        reward = trajectory.reward
        if self.weights and not trajectory.failed:
            reward = self._sum({name: trajectory.rewards[name] for name in self._finals})
        if self.length_penalty is not None and not trajectory.failed:
            reward += self.length_penalty.of(trajectory)
        if reward == trajectory.reward and all(
            one.reward == other.reward for one, other in zip(transitions, trajectory.transitions, strict=True)
        ):
            return trajectory
        return replace(trajectory, reward=reward, transitions=transitions)

    def _steps(self, total: float, named: Mapping[str, float]) -> dict[str, float]:
        if not self.weights:
            return {"reward": total}
        return {name: value for name, value in named.items() if name in self.weights or name.startswith(AIR_PREFIX)}

    @property
    def _finals(self) -> list[str]:
        return [name for name in self.weights if not name.startswith(AIR_PREFIX)]  # those are never final

    def _sum(self, named: Mapping[str, float]) -> float:
        try:
            return math.fsum(self.weights.get(name, 1.0) * value for name, value in named.items())
        except (OverflowError, ValueError):  # weights beyond all measure
            return math.nan


def _is_finite(trajectory: Trajectory) -> bool:
    return all(map(math.isfinite, [trajectory.reward, *(call.reward for call in trajectory.transitions)]))


def _rewarded(trajectory: Trajectory, reward: float) -> Trajectory:
    return trajectory if reward == trajectory.reward else replace(trajectory, reward=reward)


def without_truncated(trajectory: Trajectory) -> Trajectory:
    """The rollout with no trained token in the completions that ended at the limit of tokens."""
    if not any(call.truncated for call in trajectory.transitions):
        return trajectory
    calls = [replace(call, masked=True) if call.truncated else call for call in trajectory.transitions]
    return replace(trajectory, transitions=calls)


def shaped_air(groups: Sequence[Sequence[Trajectory]], gamma: float = 1.0) -> list[list[Trajectory]]:
    """The groups with AIR's rewards as shaping rewards.

    F = γ Φ(s') - Φ(s), Ng, Harada and Russell 1999, "Policy invariance under reward transformations", theorem 1; the
    potential Φ of a state is what the rule has given to the calls before it, and 0 after the last call (their episodic
    case). Added up with the γ of the returns, F is -Φ(s) from any state on, whatever is done there: no policy becomes
    better or worse than another.

    Rewards [-0.2, 0, -0.2] of three calls, γ = 1: Φ = [0, -0.2, -0.2], 0 at the end, F = [-0.2, 0, 0.2].
    """
    return [[_shaped(trajectory, gamma) for trajectory in group] for group in groups]


def _shaped(trajectory: Trajectory, gamma: float) -> Trajectory:
    calls = trajectory.transitions
    rules = sorted({name for call in calls for name in call.rewards if name.startswith(AIR_PREFIX)})
    if not rules:
        return trajectory
    shaped: dict[str, list[float]] = {}
    for name in rules:
        after = [*accumulate(call.rewards.get(name, 0.0) for call in calls[:-1]), 0.0]
        shaped[name] = [gamma * following - here for here, following in zip([0.0, *after], after, strict=False)]
    transitions = []
    for place, call in enumerate(calls):
        rest = {name: value for name, value in call.rewards.items() if not name.startswith(AIR_PREFIX)}
        rest |= {name: values[place] for name, values in shaped.items() if values[place]}
        transitions.append(replace(call, reward=sum(rest.values()), rewards=rest))
    return replace(trajectory, transitions=transitions)


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
