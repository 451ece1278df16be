"""LightningRL: credit to each call, advantage within the group of the task, then any single-turn loss over tokens.

The trainer drives it: groups of trajectories in, a plan of weighted minibatches out. It knows nothing of engines, stores
or clocks; the same groups and seed give the same plan, so a step can be executed again after a crash.

Source: Luo et al. 2025, "Agent Lightning: Train ANY AI Agents with Reinforcement Learning", arXiv 2508.03680.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, get_args

from agentlightning.adapters.sequences import Aggregation, merge, token_weights, unmerged
from agentlightning.algorithms.advantage import ADVANTAGES
from agentlightning.algorithms.credit import CREDIT
from agentlightning.errors import ConfigError
from agentlightning.types import Loss, Outcome, Sequence, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one training step does."""

    minibatches: list[list[Sequence]]
    """One optimizer update each; the weights of a minibatch's trained tokens sum to 1. A rollout is never split."""
    loss: Loss
    outcomes: dict[str, Outcome]
    """By rollout: trained, or zero_variance where nothing could be learned from it."""
    stats: dict[str, float] = field(default_factory=dict)
    """reward_mean, reward_std (sample, over rollouts), mixed_groups (share of groups whose rewards differ), turns (calls a
    rollout), tokens_sampled, tokens_trained, sequences, zero_variance (share of rollouts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningRL:
    """The algorithm's settings; `plan` is the algorithm."""

    group_size: int = 8
    """Rollouts of one task that are compared with each other."""
    credit: str = "uniform"
    """Which call earned what: a name in `credit.CREDIT`."""
    advantage: str = "grpo"
    """A name in `advantage.ADVANTAGES`."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""
    solved_bonus: float = 0.0
    """Adds solved_bonus × R to each advantage of a rollout: groups that are solved throughout are trained on, too."""
    loss: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """ppo_clip: clipped ratio to the sampler, for several updates a step. reinforce: no ratio, one update a step."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """The ratio to the sampler is clipped to [1 - clip_low, 1 + clip_high] (clip-higher: Yu et al. 2025, "DAPO")."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    aggregation: Aggregation = "token_mean"
    """How tokens are weighed against each other; see `adapters.sequences.token_weights`."""
    minibatches: int = 4
    """Optimizer updates a training step; fewer where there are fewer rollouts to learn from."""
    merge: bool = True
    """Merge calls whose prompts continue each other into one row; False: one row a call. The gradient is the same."""

    def __post_init__(self) -> None:
        _require(_whole(self.group_size, 2), "group_size", "a whole number of at least 2", self.group_size)
        _require(_whole(self.minibatches, 1), "minibatches", "a whole number of at least 1", self.minibatches)
        for name, known in (
            ("credit", CREDIT),
            ("advantage", ADVANTAGES),
            ("aggregation", get_args(Aggregation)),
            ("loss", ("ppo_clip", "reinforce")),
        ):
            _require(getattr(self, name) in known, name, f"one of {', '.join(sorted(known))}", getattr(self, name))
        if self.loss == "reinforce" and self.minibatches != 1:
            raise ConfigError(
                "algorithm.minibatches: expected 1 with loss = 'reinforce', whose gradient holds for fresh samples only, "
                f"got {self.minibatches}"
            )
        for name in ("solved_bonus", "entropy"):
            _require(_number(getattr(self, name), 0), name, "a number of at least 0", getattr(self, name))
        _require(_number(self.clip_low, 0, 1), "clip_low", "a number from 0 to 1", self.clip_low)
        _require(_number(self.clip_high, 0), "clip_high", "a number of at least 0", self.clip_high)
        for name in ("normalize_std", "merge"):
            _require(isinstance(getattr(self, name), bool), name, "true or false", getattr(self, name))

    def plan(self, groups: Seq[Seq[Trajectory]], seed: int) -> Plan:
        """The updates for these groups. `seed` decides which rollouts share a minibatch, and nothing else.

        A rollout whose advantages are all 0 is dropped as zero_variance and counts in no weight.
        """
        advantages = {
            trajectory.rollout_id: values
            for group in groups
            for trajectory, values in zip(group, self.advantages(group), strict=True)
        }
        trajectories = [trajectory for group in groups for trajectory in group]
        outcomes: dict[str, Outcome] = {
            rollout_id: "trained" if any(values) else "zero_variance" for rollout_id, values in advantages.items()
        }
        trained = [trajectory for trajectory in trajectories if outcomes[trajectory.rollout_id] == "trained"]
        random.Random(seed).shuffle(trained)
        parts = min(self.minibatches, len(trained))
        minibatches = [self._minibatch(trained[part::parts], advantages) for part in range(parts)]
        return Plan(
            minibatches=minibatches,
            loss=Loss(name=self.loss, clip_low=self.clip_low, clip_high=self.clip_high, entropy=self.entropy),
            outcomes=outcomes,
            stats=_stats(groups, trajectories, trained) | {"sequences": float(sum(map(len, minibatches)))},
        )

    def advantages(self, group: Seq[Trajectory]) -> list[list[float]]:
        """One number per trajectory of the group and transition."""
        if not group:
            return []
        credits = [CREDIT[self.credit](trajectory, group) for trajectory in group]
        rewards = [trajectory.reward for trajectory in group]
        advantages = ADVANTAGES[self.advantage](credits, rewards, self.normalize_std)
        return [
            [value + self.solved_bonus * reward for value in values]
            for values, reward in zip(advantages, rewards, strict=True)
        ]

    def _minibatch(self, trajectories: Seq[Trajectory], advantages: dict[str, list[float]]) -> list[Sequence]:
        rows = merge if self.merge else unmerged
        weights = token_weights(trajectories, self.aggregation)
        return [
            row
            for trajectory, weight in zip(trajectories, weights, strict=True)
            for row in rows(trajectory.rollout_id, trajectory.transitions, advantages[trajectory.rollout_id], weight)
        ]


def _stats(groups: Seq[Seq[Trajectory]], trajectories: Seq[Trajectory], trained: Seq[Trajectory]) -> dict[str, float]:
    rewards = [trajectory.reward for trajectory in trajectories]
    mixed = [len({trajectory.reward for trajectory in group}) > 1 for group in groups if group]
    count = max(1, len(trajectories))
    return {
        "reward_mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "mixed_groups": sum(mixed) / max(1, len(mixed)),
        "turns": sum(len(trajectory.transitions) for trajectory in trajectories) / count,
        "tokens_sampled": float(sum(map(_sampled, trajectories))),
        "tokens_trained": float(sum(map(_sampled, trained))),
        "zero_variance": 1.0 - len(trained) / count if trajectories else 0.0,
    }


def _sampled(trajectory: Trajectory) -> int:
    return sum(len(transition.sampled_ids) for transition in trajectory.transitions)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object, least: float, most: float = math.inf) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and least <= value <= most
    )


def _require(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"algorithm.{name}: expected {expected}, got {got!r}")
