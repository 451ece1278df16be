"""Step rewards: each call gets what was still earned from it on, compared with the same call of the other rollouts.

Sutton & Barto 2018, "Reinforcement Learning", equation 3.8 and section 13.4 (REINFORCE with a baseline that depends on the
state, here the place in the conversation); for agents: Zeng et al. 2025, "Reinforcing Multi-Turn Reasoning in LLM Agents via
Turn-Level Reward Design" (arXiv 2505.11821). Without step rewards and with γ = 1 it is uniform credit.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import NonNegativeFloat

from agentlightning.algorithms.credit.rule import Credit, credit_rule
from agentlightning.algorithms.settings import UnitInterval
from agentlightning.training_types import Trajectory


def returns_to_go(trajectory: Trajectory, gamma: float, final: float = 1.0) -> list[float]:
    """G_t = r_t + γ G_{t+1}, with `final` times the final reward earned by the last call.

    Step rewards [0.5, 0, 0], final reward 1, γ = 0.5: G = [0.75, 0.5, 1]; with final = 0 G = [0.5, 0, 0].
    """
    following, returns = 0.0, []
    for place, transition in enumerate(reversed(trajectory.transitions)):
        following = transition.reward + (final * trajectory.reward if place == 0 else gamma * following)
        returns.append(following)
    return returns[::-1]


def mean_returns(group: Sequence[Trajectory], returns: Sequence[Sequence[float]], final: float = 1.0) -> list[float]:
    """The mean return of the group's t-th calls, for each t. After its last call a rollout has its final reward (times
    `final`) and earns nothing more: that is its part of later means."""
    return [
        statistics.mean(
            earned[place] if place < len(earned) else final * trajectory.reward
            for earned, trajectory in zip(returns, group, strict=True)
        )
        for place in range(max(map(len, returns), default=0))
    ]


@credit_rule("step_rewards", each="group")
def step_rewards(
    group: Sequence[Trajectory],
    *,
    gamma: UnitInterval = 1.0,
    final: NonNegativeFloat = 1.0,
) -> list[Credit]:
    """Returns-to-go G_t, each compared with the mean of the group's t-th calls.

    `final`: how much the final reward counts besides; 0 where it is the sum of the step rewards, and would count twice.

    Two rollouts of two calls with final reward 0; step rewards [1, 0] and [0, 0]. G is [1, 0] and [0, 0], the means of the
    calls [0.5, 0]: differences [0.5, 0] and [-0.5, 0]. The second calls earned the same, and neither is praised nor blamed.
    A rollout that ended keeps its final reward in later calls' means.
    """
    returns = [returns_to_go(trajectory, gamma, final) for trajectory in group]
    scores = [earned[0] for earned in returns]
    means = mean_returns(group, returns, final)
    return [
        Credit(
            values=[value - mean for value, mean in zip(earned, means[: len(earned)], strict=True)],
            shares=[0.0] * len(earned),
            score=score,
        )
        for earned, score in zip(returns, scores, strict=True)
    ]
