"""Forked credit: the value of a state is the mean return of rollouts that were put back into it and went on from there.

After VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679), whose Monte-Carlo estimate takes the place of a critic: V(s) is
the mean return of auxiliary rollouts from s, and a step's advantage r + V(s') - V(s). We differ: only the states around some
chosen calls are forked; the rollout's own return counts among those of its states; values are drawn to the group's mean
return, which is the value of the first state. `trainer/credit_inputs.py` samples; `forked` is the rule over the returns.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Annotated

from pydantic import Field

from agentlightning.algorithms.credit.rule import Credit, Evidence, credit_rule
from agentlightning.training_types import Trajectory, Transition

Returns = Mapping[str, Sequence[float]]
"""Returns of the forks that sampled from a call of a rollout on, by the call's id."""
MAX_FORKS = 64
PRIOR = 1.0
"""Returns by which a value is drawn to the group's mean."""


@dataclass(frozen=True, slots=True)
class ForkEstimate:
    """A value or an advantage, with the variance of its sampling error."""

    value: float
    variance: float


@credit_rule("forked", each="step", needs=("fork_returns",), reads_steps=False)
def forked(
    groups: Sequence[Sequence[Trajectory]],
    evidence: Evidence,
    *,
    forks: Annotated[int, Field(ge=1, le=MAX_FORKS)] = 4,
    calls: Annotated[int, Field(ge=0)] = 2,
) -> list[list[Credit]]:
    """V(state after the call) - V(state before it), where V is the mean of n returns from that state, the rollout's own
    among them, drawn to the group's mean by one more: (n × mean + group's mean) / (n + 1).

    V of the first state is the group's mean, V after the last call the rollout's return. Calls between two states with a
    value share the difference equally, so that the credits of a rollout add up to its return less the group's mean.

    A rollout of three calls with return 1 in a group with mean 0.5, forks from its second call with returns 1, 0, 0 and from
    its third with 1, 1, 1: the values are (2 + 0.5) / 5 = 0.5 and (4 + 0.5) / 5 = 0.9, so the calls get 0, 0.4, 0.1.

    The settings are for whoever samples: `forks` of each state before and after `calls` chosen calls of a rollout (0: all).
    """
    return [
        [
            Credit(values=[one.value for one in row], shares=[0.0] * len(row))
            for row in call_estimates(group, evidence.fork_returns)
        ]
        for group in groups
    ]


def call_estimates(group: Sequence[Trajectory], returns: Mapping[str, Returns]) -> list[list[ForkEstimate]]:
    """The advantage of each call of each rollout of a group. returns: by rollout.

    Variances take the two states of a difference for independent, and the group's mean that values are drawn to for exact.
    """
    if not group:
        return []
    rewards = [one.reward for one in group]
    first = _estimate(rewards, 0.0, 0.0)
    return [_differences(one, returns.get(one.rollout_id, {}), first) for one in group]


def chosen_calls(trajectory: Trajectory, calls: int) -> list[Transition]:
    """The calls around which to fork, those of the highest mean negative log-probability of the sampled tokens first: at
    most `calls` of those that are trained, 0: all."""
    trained = [one for one in trajectory.transitions if one.trained and one.trained_tokens]
    ordered = sorted(trained, key=lambda one: (-_surprise(one), one.call_id))
    return ordered[:calls] if calls else ordered


def _differences(trajectory: Trajectory, returns: Returns, first: ForkEstimate) -> list[ForkEstimate]:
    # By id, that is in the order in which they began, as a fork counts them; transitions are in the order of their ends.
    order = sorted(range(len(trajectory.transitions)), key=lambda place: trajectory.transitions[place].call_id)
    ids = [trajectory.transitions[place].call_id for place in order]
    states = [(0, first)]
    for place, call_id in enumerate(ids):
        if place and (found := returns.get(call_id)):
            states.append((place, _estimate([trajectory.reward, *found], PRIOR, first.value)))
    states.append((len(ids), ForkEstimate(trajectory.reward, 0.0)))
    calls = [first] * len(ids)
    for (start, before), (end, after) in pairwise(states):
        count = end - start
        share = ForkEstimate((after.value - before.value) / count, (after.variance + before.variance) / count**2)
        for place in order[start:end]:
            calls[place] = share
    return calls


def _estimate(returns: Sequence[float], prior: float, towards: float) -> ForkEstimate:
    """The mean of the returns, drawn to `towards`; its variance is that of the mean, 0 where there is but one return."""
    count = len(returns)
    variance = statistics.variance(returns) / count if count > 1 else 0.0
    weight = count / (count + prior)
    return ForkEstimate(weight * statistics.mean(returns) + (1.0 - weight) * towards, weight**2 * variance)


def _surprise(transition: Transition) -> float:
    return -statistics.fmean(compress(transition.logprobs, transition.mask))
