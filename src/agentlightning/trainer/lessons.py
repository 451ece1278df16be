"""Lessons: what the policies of a run learn from a step's rollouts.

The training loop drives it, first `prepare`, then `update`. Each policy sees the whole rollouts and learns from its own
calls, by its own algorithm. With one policy the metrics have plain names; with several, ``ALIAS/name`` beside those of
all. Knows nothing of how one policy learns (`learning.py`).
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from agentlightning.adapters.trajectories import final_rewards
from agentlightning.algorithms.lightning_rl import Plan
from agentlightning.algorithms.selection import Selection
from agentlightning.engines.base import Metrics
from agentlightning.errors import NoCallsError
from agentlightning.trainer.learning import Learning
from agentlightning.trainer.record import Recorded, read_record, seen_by
from agentlightning.trainer.staleness import Staleness
from agentlightning.types import Outcome, Reward, Rollout, Trajectory

_STALE: Outcome = "stale"
SUMS = ("tokens_sampled", "tokens_trained", "sequences")
"""Metrics that mean something as the sum over all policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What a step has to teach."""

    plans: Mapping[str, Plan]
    """By policy."""
    metrics: Metrics
    """Of the rollouts and of the plans."""
    outcomes: dict[str, Outcome]
    """By rollout that has a trajectory."""
    resample: list[str]
    """Groups from which nothing is learned, where the algorithms want them made up for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """How the policies of a run learn."""

    learnings: Mapping[str, Learning]
    """By policy; at least one."""
    selections: Mapping[str, Selection]
    """The calls of each."""
    learning_rate: float
    """Of a policy that has no rate of its own, at its full height."""

    async def prepare(self, step: int, rollouts: Seq[Rollout], staleness: Staleness | None = None) -> Lesson:
        """The plans for these rollouts, of those that are not too stale.

        AgentError where all of them failed; NoCallsError where none has a call that is to be learned from.
        """
        one = next(iter(self.learnings.values()))
        on_failure = one.config.agent.on_failure
        record = await read_record(one.store, rollouts, self.selections, on_failure, one.progress, one.config.air.rules)
        self._refuse_idle(record)
        groups, metrics = record.groups, record.metrics
        stale: list[str] = []
        if staleness is not None:
            groups, stale, ages = staleness.sort(groups)
            metrics = metrics | ages
        plans: dict[str, Plan] = {}
        for policy, learning in self.learnings.items():
            plans[policy], cost = await learning.plan(step, seen_by(groups, record.selected[policy]))
            metrics = metrics | self._named(policy, cost | plans[policy].stats)
        outcomes = joint_outcomes([plan.outcomes for plan in plans.values()]) | dict.fromkeys(stale, _STALE)
        if len(plans) > 1:
            metrics = metrics | _over_all(groups, plans)
        return Lesson(plans=plans, metrics=metrics, outcomes=outcomes, resample=self._resample(plans))

    async def update(self, lesson: Lesson, learning_rate: float) -> Metrics:
        """Execute the plans, those of several policies side by side; means over each one's updates.

        learning_rate: in this step, of a policy that has no rate of its own; the others follow the same schedule.
        """
        rates = {
            policy: learning_rate * learning.config.trainer.learning_rate / self.learning_rate
            for policy, learning in self.learnings.items()
        }
        done = await asyncio.gather(
            *(one.update(lesson.plans[policy], rates[policy]) for policy, one in self.learnings.items()),
            return_exceptions=True,  # a learner that is lost must not leave another in the middle of an update
        )
        metrics: Metrics = {}
        for policy, updates in zip(self.learnings, done, strict=True):
            if isinstance(updates, BaseException):
                raise updates
            if len(self.learnings) > 1:
                updates = updates | {"learning_rate": rates[policy]}
            metrics |= self._named(policy, updates)
        return metrics

    async def success(self, name: str, rollouts: Seq[Rollout]) -> Metrics:
        """Of an evaluation's rollouts, ``ALIAS/name`` of each policy that has rewards of its own; one policy alone has none.

        A policy's success is the mean of its weighted rewards, as `algorithm.reward_weights` says; a reward that is
        missing counts as 0.
        """
        weights = {policy: one.algorithm.reward_weights for policy, one in self.learnings.items()}
        if len(weights) == 1 or not any(weights.values()):
            return {}
        store = next(iter(self.learnings.values())).store
        attempts = {rollout.id: rollout.attempt for rollout in rollouts if rollout.state == "succeeded"}
        told: dict[str, list[Reward]] = {rollout_id: [] for rollout_id in attempts}
        for reward in await store.rewards(list(attempts)):
            if reward.attempt == attempts[reward.rollout_id]:
                told[reward.rollout_id].append(reward)
        finals = [final_rewards(rewards) for rewards in told.values()]
        return {
            f"{policy}/{name}": sum(one.get(key, 0.0) * weight for one in finals for key, weight in own.items())
            / len(rollouts)
            for policy, own in weights.items()
            if own
        }

    def _refuse_idle(self, record: Recorded) -> None:
        idle = [policy for policy, calls in record.selected.items() if not calls]
        if not idle or not record.groups:
            return
        names = ", ".join(sorted(record.names)) or "none"
        wanted = {policy: self.learnings[policy].algorithm.agents for policy in idle}
        which = "; ".join(
            f"policy {policy!r}" + (f" with agents = {list(agents)}" if agents is not None else "")
            for policy, agents in wanted.items()
        )
        sentence = f"no call of this step is learned from by {which}; agents and models of its calls: {names}"
        if len(idle) == len(self.learnings):
            raise NoCallsError(sentence)
        self.learnings[idle[0]].progress.note(sentence)

    def _resample(self, plans: Mapping[str, Plan]) -> list[str]:
        """The groups that have no signal for any policy that wants such groups made up for."""
        asking = [plan.resample for policy, plan in plans.items() if self.learnings[policy].algorithm.dynamic_sampling]
        return [group for group in asking[0] if all(group in others for others in asking)] if asking else []

    def _named(self, policy: str, metrics: Metrics) -> Metrics:
        return metrics if len(self.learnings) == 1 else {f"{policy}/{name}": value for name, value in metrics.items()}


def joint_outcomes(outcomes: Seq[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """What became of each rollout over all policies: the most that any of them could do with it.

    >>> joint_outcomes([{"a": "zero_variance", "b": "invalid"}, {"a": "trained", "b": "zero_variance"}])
    {'a': 'trained', 'b': 'zero_variance'}
    """
    joint: dict[str, Outcome] = {}
    for ofone in outcomes:
        for rollout_id, outcome in ofone.items():
            known = joint.get(rollout_id)
            if known is None or _WORTH.index(outcome) > _WORTH.index(known):
                joint[rollout_id] = outcome
    return joint


_WORTH: tuple[Outcome, ...] = ("invalid", "zero_variance", "trained")


def _over_all(groups: Seq[Seq[Trajectory]], plans: Mapping[str, Plan]) -> Metrics:
    """reward_mean and mixed_groups of the rollouts' own final rewards, turns of all policies, and sums over them."""
    rewards = [[one.reward for one in group if math.isfinite(one.reward)] for group in groups]
    flat = [reward for group in rewards for reward in group]
    turns = [len(one.transitions) for group in groups for one in group]
    return {
        "reward_mean": statistics.fmean(flat) if flat else 0.0,
        "mixed_groups": statistics.fmean(len(set(group)) > 1 for group in rewards) if rewards else 0.0,
        "turns": statistics.fmean(turns) if turns else 0.0,
        **{name: sum(plan.stats[name] for plan in plans.values()) for name in SUMS},
    }
