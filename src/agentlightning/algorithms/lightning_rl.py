"""LightningRL: credit to each call, advantage within the group of the task, then any single-turn loss over tokens.

The trainer drives it: groups of trajectories in, a plan of weighted minibatches out. It knows nothing of engines, stores
or clocks; the same groups and seed give the same plan, so a step can be executed again after a crash.

Source: Luo et al. 2025, "Agent Lightning: Train ANY AI Agents with Reinforcement Learning", arXiv 2508.03680.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from agentlightning.adapters.sequences import Aggregation, merge, token_weights, unmerged
from agentlightning.algorithms.advantage import ADVANTAGES, BATCH
from agentlightning.algorithms.credit import Evidence, Rule, find_rule, path_of
from agentlightning.algorithms.credit.rule import Credit
from agentlightning.algorithms.rewards import MissingReward, RewardPolicy
from agentlightning.errors import ConfigError, RewardError
from agentlightning.types import Loss, Outcome, Sequence, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one training step does."""

    minibatches: list[list[Sequence]]
    """One optimizer update each; the weights of a minibatch's trained tokens sum to 1. A rollout is never split."""
    loss: Loss
    outcomes: dict[str, Outcome]
    """By rollout: trained, zero_variance where nothing could be learned from it, or invalid by a policy of the
    settings."""
    resample: list[str] = field(default_factory=list)
    """With dynamic sampling: the groups from which nothing is learned, to be made up for by new ones."""
    stats: dict[str, float] = field(default_factory=dict)
    """reward_mean, reward_std (sample, over rollouts), mixed_groups (share of groups whose rewards differ), turns
    (calls a rollout), tokens_sampled, tokens_trained, sequences, zero_variance (share of rollouts); where there are
    any: unrewarded and filled (rollouts), incomplete_groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningRL:
    """The algorithm's settings; `plan` is the algorithm."""

    group_size: int = 8
    """Rollouts of one task that are compared with each other."""
    credit: str | Rule = "uniform"
    """Which call earned what: a name in `credit.CREDIT`, ``file.py:name`` of a rule of your own, or that rule itself."""
    credit_settings: Mapping[str, Any] | None = None
    """The rule's own settings."""
    advantage: str = "grpo"
    """A name in `advantage.ADVANTAGES`."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation (grpo)."""
    reward_weights: Mapping[str, float] | None = None
    """By name of a reward: rollouts are rewarded by their weighted sum. None: by the one final reward."""
    missing_reward: MissingReward = "drop"
    """What becomes of a rollout with a reward that is missing, late or no finite number: drop, fill (`fill_reward`)
    or fail."""
    fill_reward: float | None = None
    incomplete_groups: Literal["train", "drop", "fail"] = "train"
    """What becomes of a group with fewer than group_size usable rollouts."""
    dynamic_sampling: bool = False
    """Make up for groups from which nothing is learned (Yu et al. 2025, "DAPO", section 3.2)."""
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
        if isinstance(self.credit, Rule):
            object.__setattr__(self, "credit", path_of(self.credit))
        _require(_whole(self.group_size, 2), "group_size", "a whole number of at least 2", self.group_size)
        _require(_whole(self.minibatches, 1), "minibatches", "a whole number of at least 1", self.minibatches)
        for name, known in (
            ("advantage", ADVANTAGES),
            ("aggregation", get_args(Aggregation)),
            ("loss", ("ppo_clip", "reinforce")),
            ("missing_reward", get_args(MissingReward)),
            ("incomplete_groups", ("train", "drop", "fail")),
        ):
            _require(getattr(self, name) in known, name, f"one of {', '.join(sorted(known))}", getattr(self, name))
        self._check_credit()
        self._check_rewards()
        if self.loss == "reinforce" and self.minibatches != 1:
            raise ConfigError(
                "algorithm.minibatches: expected 1 with loss = 'reinforce', whose gradient holds for fresh samples only, "
                f"got {self.minibatches}"
            )
        for name in ("solved_bonus", "entropy"):
            _require(_number(getattr(self, name), 0), name, "a number of at least 0", getattr(self, name))
        _require(_number(self.clip_low, 0, 1), "clip_low", "a number from 0 to 1", self.clip_low)
        _require(_number(self.clip_high, 0), "clip_high", "a number of at least 0", self.clip_high)
        for name in ("normalize_std", "merge", "dynamic_sampling"):
            _require(isinstance(getattr(self, name), bool), name, "true or false", getattr(self, name))
        if not self.normalize_std and self.advantage != "grpo":
            raise ConfigError(
                f"algorithm.normalize_std: has an effect with advantage = 'grpo' only, not with {self.advantage!r}"
            )

    def plan(self, groups: Seq[Seq[Trajectory]], seed: int, evidence: Evidence | None = None) -> Plan:
        """The updates for these groups. `seed` decides which rollouts share a minibatch, and nothing else.

        A rollout whose advantages are all 0 is dropped as zero_variance and counts in no weight. `evidence` is what
        the credit rule asks for (`rule.needs`): a judge's scores, earlier groups.
        """
        evidence = evidence or Evidence()
        if evidence.history:
            evidence = replace(evidence, history=self._rewards().settle(evidence.history).groups)
        usable, outcomes, counts = self._usable(groups, evidence)
        advantages = self._advantages(usable, evidence)
        trajectories = [trajectory for group in usable for trajectory in group]
        outcomes |= {
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
            resample=_without_signal(groups, outcomes) if self.dynamic_sampling else [],
            stats=_stats(usable, trajectories, trained) | counts | {"sequences": float(sum(map(len, minibatches)))},
        )

    def advantages(self, group: Seq[Trajectory]) -> list[list[float]]:
        """One number per trajectory of a group on its own and transition."""
        found = self._advantages([group], Evidence())
        return [found[trajectory.rollout_id] for trajectory in group]

    def _usable(
        self, groups: Seq[Seq[Trajectory]], evidence: Evidence
    ) -> tuple[list[list[Trajectory]], dict[str, Outcome], dict[str, float]]:
        """Groups with known rewards and as many rollouts as the settings ask for; the others' outcomes, and how many
        they are."""
        settled = self._rewards().settle(groups)
        unknown = set(settled.dropped)
        if "scores" in find_rule(str(self.credit)).needs:
            unscored = {one.rollout_id for group in settled.groups for one in group} - set(evidence.scores)
            if unscored and self.missing_reward != "drop":
                raise RewardError(
                    f"rollout {min(unscored)}: the judge gave no score; only missing_reward = 'drop' allows that"
                )
            unknown |= unscored
        kept, short = [], 0
        for group in settled.groups:
            members = [trajectory for trajectory in group if trajectory.rollout_id not in unknown]
            if len(members) < self.group_size and self.incomplete_groups != "train":
                short += 1
                if self.incomplete_groups == "fail":
                    raise RewardError(
                        f"algorithm.incomplete_groups: a group has {len(members)} of {self.group_size} usable rollouts"
                    )
                members = []
            if members:
                kept.append(members)
        usable = {trajectory.rollout_id for group in kept for trajectory in group}
        outcomes: dict[str, Outcome] = {
            trajectory.rollout_id: "invalid"
            for group in groups
            for trajectory in group
            if trajectory.rollout_id not in usable
        }
        counts = {"unrewarded": len(unknown), "filled": settled.filled, "incomplete_groups": short}
        return kept, outcomes, {name: float(count) for name, count in counts.items() if count}

    def _advantages(self, groups: Seq[Seq[Trajectory]], evidence: Evidence) -> dict[str, list[float]]:
        """By rollout: one number per transition."""
        rule = find_rule(str(self.credit))
        credits = rule.credits(groups, evidence, rule.settings(self.credit_settings or {}))
        values = [row for group, ofgroup in zip(groups, credits, strict=True) for row in self._within(group, ofgroup)]
        if self.advantage in BATCH:
            values = BATCH[self.advantage](values)
        trajectories = [trajectory for group in groups for trajectory in group]
        flat = [credit for ofgroup in credits for credit in ofgroup]
        return {
            trajectory.rollout_id: self._with_bonus(trajectory, credit, row)
            for trajectory, credit, row in zip(trajectories, flat, values, strict=True)
        }

    def _within(self, group: Seq[Trajectory], credits: Seq[Credit]) -> list[list[float]]:
        if not group:
            return []
        scores = [
            trajectory.reward if credit.score is None else credit.score
            for trajectory, credit in zip(group, credits, strict=True)
        ]
        shares = None
        if any(credit.shares is not None for credit in credits):
            shares = [[1.0] * len(credit.values) if credit.shares is None else credit.shares for credit in credits]
        return ADVANTAGES[self.advantage]([credit.values for credit in credits], scores, self.normalize_std, shares)

    def _with_bonus(self, trajectory: Trajectory, credit: Credit, values: Seq[float]) -> list[float]:
        solved = self.solved_bonus * trajectory.reward
        return [
            value + extra + solved for value, extra in zip(values, credit.bonus or [0.0] * len(values), strict=True)
        ]

    def _rewards(self) -> RewardPolicy:
        return RewardPolicy(weights=self.reward_weights or {}, missing=self.missing_reward, fill=self.fill_reward)

    def _check_credit(self) -> None:
        _require(isinstance(self.credit, str), "credit", "the name of a rule", self.credit)
        find_rule(str(self.credit)).settings(self.credit_settings or {})

    def _check_rewards(self) -> None:
        for name, weight in (self.reward_weights or {}).items():
            _require(_number(weight, -math.inf), f"reward_weights.{name}", "a number", weight)
        if self.missing_reward == "fill":
            _require(
                _number(self.fill_reward, -math.inf),
                "fill_reward",
                "a number with missing_reward = 'fill'",
                self.fill_reward,
            )
        elif self.fill_reward is not None:
            raise ConfigError(f"algorithm.fill_reward: has no effect with missing_reward = {self.missing_reward!r}")

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


def _without_signal(groups: Seq[Seq[Trajectory]], outcomes: Mapping[str, Outcome]) -> list[str]:
    return [
        group[0].group_id
        for group in groups
        if group and all(outcomes[trajectory.rollout_id] != "trained" for trajectory in group)
    ]


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
