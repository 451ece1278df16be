"""Grouped GAE: generalised advantage estimates over calls, whose values are means over the group instead of a critic's.

After GAGPO (Zhu et al. 2026, "Generalized Advantage Grouped Policy Optimization", arXiv 2605.13217): a non-parametric value
of each state, the mean discounted return of the group's calls made in it, then TD errors and GAE over calls (Schulman et al.
2016, arXiv 1506.02438, equations 11 and 16). We differ: a state that one rollout alone has seen has the value of its place,
the mean over the group's t-th calls, since its own return as its value would leave no error.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence

from agentlightning.algorithms.credit.keys import Key, observation_key, user_key
from agentlightning.algorithms.credit.rule import Credit, credit_rule
from agentlightning.algorithms.credit.step_rewards import mean_returns, returns_to_go
from agentlightning.algorithms.critic import gae
from agentlightning.algorithms.settings import UnitInterval
from agentlightning.training_types import Trajectory


@credit_rule("grouped_gae", each="group")
def grouped_gae(group: Sequence[Trajectory], *, lam: UnitInterval = 0.95, key: str | None = None) -> list[Credit]:
    """Â_t = δ_t + λ Â_{t+1} with δ_t = r_t + V_{t+1} - V_t, γ = 1; the last call earns the final reward, too.

    V is the mean return of the group's calls in the same state, by `key` (a function ``file.py:name`` of a transition;
    default: the task and the last observation), in a state that one rollout alone has seen of its t-th calls.

    Two rollouts of two calls in states of their own with rewards 1 and 0, λ = 0.5: V = [0.5, 0.5], δ = [0, 0.5] and
    [0, -0.5], Â = [0.25, 0.5] and [-0.25, -0.5].
    """
    returns = [returns_to_go(trajectory, 1.0) for trajectory in group]
    values = _values(group, returns, observation_key if key is None else user_key(key))
    credits = []
    for trajectory, earned, expected in zip(group, returns, values, strict=True):
        rewards = [transition.reward for transition in trajectory.transitions]
        rewards[-1] += trajectory.reward
        advantages, _ = gae(rewards, expected, 1.0, lam)
        credits.append(Credit(values=advantages, shares=[0.0] * len(advantages), score=earned[0]))
    return credits


def _values(group: Sequence[Trajectory], returns: Sequence[Sequence[float]], state: Key) -> list[list[float]]:
    means = mean_returns(group, returns)
    values = [means[: len(earned)] for earned in returns]
    visits: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for rollout, trajectory in enumerate(group):
        for place, transition in enumerate(trajectory.transitions):
            visits[state(transition)].append((rollout, place))
    for where, calls in visits.items():
        if where is None or len({rollout for rollout, _ in calls}) == 1:
            continue
        mean = statistics.mean(returns[rollout][place] for rollout, place in calls)
        for rollout, place in calls:
            values[rollout][place] = mean
    return values
