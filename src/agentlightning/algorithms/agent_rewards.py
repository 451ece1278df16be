"""Rewards of several agents that one policy plays: each is compared with itself, by a return of its own.

LightningRL drives it where `agent_reward_weights` is set. A step is learned from once per agent, with the others' calls as
context, and what each call gets is put together again. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentlightning.algorithms.credit.rule import Credit
from agentlightning.algorithms.rewards import RewardPolicy
from agentlightning.algorithms.selection import own_groups
from agentlightning.algorithms.updates import Signal
from agentlightning.training_types import Trajectory, Transition

Signals = tuple[dict[str, Signal], dict[str, float]]
Groups = Sequence[Sequence[Trajectory]]


@dataclass(frozen=True, slots=True)
class AgentRewards:
    """The weights by which the rewards of a rollout make the return of each agent."""

    weights: Mapping[str, Mapping[str, float]]
    """By agent; a call is of the agent whose name it has, else of the one whose name it asked for as its model. Calls of
    others keep the rollout's own reward."""
    policy: RewardPolicy
    """The treatment of rewards that are missing."""

    def unknown(self, groups: Groups) -> set[str]:
        """The rollouts that have not all rewards of all agents. RewardError where that is to fail."""
        return {rollout_id for agent in self.weights for rollout_id in self._rewards(agent).settle(groups).dropped}

    def signals(self, groups: Groups, signals_of: Callable[[Groups], Signals]) -> Signals:
        """The signal of every own call, from one round of `signals_of` for each agent, and the means of their metrics.

        Liu et al. 2025, "SPIRAL: Self-Play on Zero-Sum Games Incentivizes Reasoning via Multi-Agent Multi-Turn Reinforcement
        Learning" (arXiv 2506.24119), role-conditioned advantage estimation: a baseline for each role; here it is the mean
        of the role's returns in the group in place of a moving average of them. Two games of one task that white won and
        lost (1 and -1), black = {reward: -1}, dr_grpo: white's calls get [1, -1], black's [-1, 1].
        """
        if not self.weights:
            return signals_of(groups)
        names = [*self.weights, None] if _has_others(groups, self.weights) else [*self.weights]
        parts = {agent: signals_of(self._part(groups, agent)) for agent in names}
        joined = {
            one.rollout_id: _joined(one, [self._of(call) for call in one.transitions], parts)
            for group in own_groups(groups)
            for one in group
        }
        stats = {name for _, found in parts.values() for name in found}
        means = {
            name: statistics.fmean(found[name] for _, found in parts.values() if name in found)
            for name in sorted(stats)
        }
        return joined, means | self._means(groups)

    def _rewards(self, agent: str) -> RewardPolicy:
        return replace(self.policy, weights=self.weights[agent])

    def _part(self, groups: Groups, agent: str | None) -> list[list[Trajectory]]:
        """The groups as one agent is learned from: its own return, and the calls of all others as context."""
        rewarded = groups if agent is None else self._rewards(agent).settle(groups).groups
        return [
            [
                replace(
                    one,
                    transitions=[
                        replace(call, trained=call.trained and self._of(call) == agent) for call in one.transitions
                    ],
                )
                for one in group
            ]
            for group in rewarded
        ]

    def _of(self, call: Transition) -> str | None:
        """The agent of a call; None where it is none of those that have weights."""
        return next((name for name in (call.agent, call.model) if name in self.weights), None)

    def _means(self, groups: Groups) -> dict[str, float]:
        means = {}
        for agent in self.weights:
            rewards = [one.reward for group in own_groups(self._part(groups, agent)) for one in group]
            if rewards:
                means[f"agents/{agent}/reward_mean"] = statistics.fmean(rewards)
        return means


def _has_others(groups: Groups, weights: Mapping[str, object]) -> bool:
    return any(
        call.trained and call.agent not in weights and call.model not in weights
        for group in groups
        for one in group
        for call in one.transitions
    )


def _joined(trajectory: Trajectory, agents: Sequence[str | None], parts: Mapping[str | None, Signals]) -> Signal:
    """The signal of a rollout whose own calls are of these agents, call by call from that of its agent."""
    given = {agent: parts[agent][0][trajectory.rollout_id] for agent in set(agents)}
    places: dict[str | None, int] = dict.fromkeys(given, 0)
    picked = []
    for agent in agents:
        picked.append((given[agent], places[agent]))
        places[agent] += 1
    first = next(iter(given.values()))
    return Signal(
        advantages=[one.advantages[place] for one, place in picked],
        others={name: [one.others[name][place] for one, place in picked] for name in first.others},
        credit=Credit(
            values=[one.credit.values[place] for one, place in picked],
            shares=[1.0 if one.credit.shares is None else one.credit.shares[place] for one, place in picked],
            bonus=[0.0 if one.credit.bonus is None else one.credit.bonus[place] for one, place in picked],
        ),
    )
