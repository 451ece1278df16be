"""Forked credit: the value of a state is the mean return of rollouts that were put back into it and went on from there.

After VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679), whose Monte-Carlo estimate takes the place of a critic: V(s) is
the mean return of auxiliary rollouts from s, and a step's advantage r + V(s') - V(s). We differ: a state is that of an agent
before one of its calls, which a fork brings back; only the states around some chosen calls are forked; the rollout's own
return counts among those of its states; values are drawn to the group's mean return; the first state has that mean itself,
since all rollouts of a group began in it.

`chosen_calls` says around which calls to fork; `trainer/credit_inputs.py` samples; `forked` is the rule over the returns.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from agentlightning.algorithms.credit.keys import observation_key
from agentlightning.algorithms.credit.rule import Credit, Evidence, credit_rule
from agentlightning.training_types import Trajectory, Transition

Choice = Literal["surprise", "variance"]
Returns = Mapping[str, Sequence[float]]
"""Returns of the forks that sampled from a call of a rollout on, by the call's id."""
MAX_FORKS = 64


@dataclass(frozen=True, slots=True)
class ForkEstimate:
    """A value or an advantage, with the variance of its sampling error."""

    value: float
    variance: float


@credit_rule("forked", each="step", needs=("fork_returns",), reads_steps=False, idle=("choose", "calls", 0))
def forked(
    groups: Sequence[Sequence[Trajectory]],
    evidence: Evidence,
    *,
    forks: Annotated[int, Field(ge=1, le=MAX_FORKS)] = 4,
    calls: Annotated[int, Field(ge=0)] = 2,
    choose: Choice = "surprise",
    prior: NonNegativeFloat = 1.0,
) -> list[list[Credit]]:
    """V(state after the call) - V(state before it), where V is the mean of n returns from that state, the rollout's own
    among them, drawn to the group's mean: (n × mean + prior × group's mean) / (n + prior).

    V of the first state is the group's mean, V after the last call the rollout's return. Calls between two states with a
    value share the difference equally, so that the credits of a rollout add up to its return less the group's mean.

    A rollout of three calls with return 1 in a group with mean 0.5, forks from its second call with returns 1, 0, 0 and from
    its third with 1, 1, 1; prior = 0: V = 0.5, 0.5, 1, 1, so the calls get 0, 0.5, 0. With prior = 1 the values are
    (2 + 0.5) / 5 = 0.5 and (4 + 0.5) / 5 = 0.9: 0, 0.4, 0.1.

    The other settings are for whoever samples: `forks` of each state before and after `calls` chosen calls of a rollout (0:
    all of them), chosen by `choose`.
    """
    return [
        [
            Credit(values=[one.value for one in row], shares=[0.0] * len(row))
            for row in call_estimates(group, evidence.fork_returns, prior)
        ]
        for group in groups
    ]


def call_estimates(
    group: Sequence[Trajectory], returns: Mapping[str, Returns], prior: float
) -> list[list[ForkEstimate]]:
    """The advantage of each call of each rollout of a group. returns: by rollout.

    Variances take the two states of a difference for independent, and the group's mean that values are drawn to for exact.
    """
    if not group:
        return []
    rewards = [one.reward for one in group]
    first = _estimate(rewards, 0.0, 0.0)
    return [_differences(one, returns.get(one.rollout_id, {}), first, prior) for one in group]


def chosen_calls(trajectory: Trajectory, group: Sequence[Trajectory], calls: int, choose: Choice) -> list[Transition]:
    """The calls around which to fork, the most promising first: at most `calls` of those that are trained, 0: all.

    surprise: those of the highest mean negative log-probability of the sampled tokens, in nats. variance: those before
    which the returns of the group's rollouts that were told the same (`observation_key`) varied most; of a state that no
    other rollout was in, the variance is the whole group's.
    """
    trained = [one for one in trajectory.transitions if one.trained and one.trained_tokens]
    score = {one.call_id: _surprise(one) for one in trained} if choose == "surprise" else _variances(trained, group)
    ordered = sorted(trained, key=lambda one: (-score[one.call_id], one.call_id))
    return ordered[:calls] if calls else ordered


def _differences(trajectory: Trajectory, returns: Returns, first: ForkEstimate, prior: float) -> list[ForkEstimate]:
    # By id, that is in the order in which they began, as a fork counts them; transitions are in the order of their ends.
    order = sorted(range(len(trajectory.transitions)), key=lambda place: trajectory.transitions[place].call_id)
    ids = [trajectory.transitions[place].call_id for place in order]
    states = [(0, first)]
    for place, call_id in enumerate(ids):
        if place and (found := returns.get(call_id)):
            states.append((place, _estimate([trajectory.reward, *found], prior, first.value)))
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


def _variances(transitions: Sequence[Transition], group: Sequence[Trajectory]) -> dict[str, float]:
    seen: defaultdict[Hashable, dict[str, float]] = defaultdict(dict)
    for one in group:
        for transition in one.transitions:
            seen[observation_key(transition)][one.rollout_id] = one.reward
    whole = statistics.pvariance([one.reward for one in group])
    told = {one.call_id: list(seen[observation_key(one)].values()) for one in transitions}
    return {call_id: statistics.pvariance(found) if len(found) > 1 else whole for call_id, found in told.items()}
