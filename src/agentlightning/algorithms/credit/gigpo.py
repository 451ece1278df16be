"""GiGPO: rollouts compared within their group, and calls compared with the calls made in the same state.

Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training" (arXiv 2505.10978), equations 3 to 8: A
= A_episode + ω A_step. The episode's part is the advantage rule's; this file adds the step's part. An anchor state is
a prompt that several calls of a group have in common, by its tokens or by a key function of the user's.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from agentlightning.algorithms.credit.keys import prompt_key, user_key
from agentlightning.algorithms.credit.rule import Credit, credit_rule
from agentlightning.algorithms.credit.step_rewards import returns_to_go
from agentlightning.algorithms.rewards import without_rounding
from agentlightning.training_types import Trajectory, Transition

GAMMA = 0.95
"""Discount within a state's calls, the authors'; rollouts are compared without one."""
STEP_EPSILON = 1e-6
"""Added to a deviation, as in the authors' code (verl-agent)."""


@credit_rule("gigpo", each="group")
def gigpo(group: Sequence[Trajectory], *, key: str | None = None) -> list[Credit]:
    """The rollout's reward with its step rewards for each transition (A_episode), plus (G - mean) / deviation over the calls
    of its anchor state (A_step): the authors' ω = 1.

    G is the discounted return (equation 5), the deviation the sample one. An anchor that one call alone has seen adds
    0. Two one-call rollouts from one prompt with rewards 1 and 0: G = [1, 0], mean 0.5, deviation 0.7071: A_step =
    [0.7071, -0.7071]. `key` names a function ``file.py:name`` of a transition; calls with equal, non-None keys share
    an anchor.
    """
    state = prompt_key if key is None else user_key(key)
    returns = [returns_to_go(trajectory, GAMMA) for trajectory in group]
    steps = _step_advantages(group, returns, state)
    totals = [
        trajectory.reward + sum(transition.reward for transition in trajectory.transitions) for trajectory in group
    ]
    return [
        Credit(values=[total] * len(step), bonus=step, score=total) for total, step in zip(totals, steps, strict=True)
    ]


def _step_advantages(
    group: Sequence[Trajectory],
    returns: Sequence[Sequence[float]],
    state: Callable[[Transition], Hashable],
) -> list[list[float]]:
    anchors: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for rollout, trajectory in enumerate(group):
        for place, transition in enumerate(trajectory.transitions):
            anchors[state(transition)].append((rollout, place))
    steps = [[0.0] * len(earned) for earned in returns]
    for anchor, members in anchors.items():
        if anchor is None or len(members) == 1:
            continue
        earned = without_rounding([returns[rollout][place] for rollout, place in members])
        mean = statistics.mean(earned)
        scale = statistics.stdev(earned) + STEP_EPSILON
        for (rollout, place), value in zip(members, earned, strict=True):
            steps[rollout][place] = (value - mean) / scale
    return steps
