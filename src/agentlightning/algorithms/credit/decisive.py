"""Decisive credit: dynamic weights by how much of the reward is decided at a call's place on the path.

Ours. A place is an agent's name, else the number of the call among those without a name. At each place the rollouts of a
group are sorted by the action taken there (equal completions, or a `key`); how much of the reward's variance lies between
actions and not within them, over the groups of this step and of earlier ones, is Kelley's (1935) epsilon squared, the
correlation ratio η² without the share that chance gives it:

    d = max(0, 1 - (SSW / Σ(n - k)) / (SST / Σ(n - 1)))

with SSW the squares of rewards around their action's mean, SST those around their group's, n rollouts and k actions of a
group at that place. 0: what is done there decides nothing; 1: it decides all. A call's reward is R × w, w = 0.1 + 0.9 × d /
mean d over the calls of its rollout, so that the weights of a rollout have mean 1. If every action is another one nothing is
known of a place, and its d is the mean of the others.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from agentlightning.algorithms.credit.keys import Key, answer_key, places, user_key
from agentlightning.algorithms.credit.rule import Credit, Evidence, credit_rule
from agentlightning.training_types import Trajectory

FLOOR = 0.1
"""Of a call's weight: every call keeps a part."""


@credit_rule("decisive", each="step", needs=("history",), reads_steps=False)
def decisive(
    groups: Sequence[Sequence[Trajectory]], evidence: Evidence, *, key: str | None = None
) -> list[list[Credit]]:
    """R × w for each call, compared with w × the group's baseline.

    Two places, of which the first decides all and the second nothing: weights 1.9 and 0.1.
    """
    known = decisiveness([*evidence.history, *groups], answer_key if key is None else user_key(key))
    return [[_credit(trajectory, known) for trajectory in group] for group in groups]


def decisiveness(groups: Sequence[Sequence[Trajectory]], key: Key) -> dict[Hashable, float]:
    """d of each place of which something is known. Rewards [1, 1, 0, 0] with actions [a, a, b, b] at a place: 1."""
    within: defaultdict[Hashable, float] = defaultdict(float)
    total: defaultdict[Hashable, float] = defaultdict(float)
    freedom: defaultdict[Hashable, list[int]] = defaultdict(lambda: [0, 0])
    for group in groups:
        taken: defaultdict[Hashable, dict[Hashable, list[float]]] = defaultdict(dict)
        for trajectory in group:
            first = dict(reversed([*zip(places(trajectory), trajectory.transitions, strict=True)]))
            for place, call in first.items():  # an agent's first call of a rollout is its action
                taken[place].setdefault(key(call), []).append(trajectory.reward)
        for place, by_action in taken.items():
            rewards = [reward for of_action in by_action.values() for reward in of_action]
            within[place] += sum(_squares(of_action) for of_action in by_action.values())
            total[place] += _squares(rewards)
            freedom[place][0] += len(rewards) - len(by_action)
            freedom[place][1] += len(rewards) - 1
    return {
        place: _share(1.0 - (within[place] / inside) / (total[place] / over))
        for place, (inside, over) in freedom.items()
        if inside and total[place]
    }


def _share(found: float) -> float:
    """0 for what rounding leaves of a zero: divided by its own mean it would weigh as much as a place that decides all."""
    return found if found > 1e-9 else 0.0


def _credit(trajectory: Trajectory, known: Mapping[Hashable, float]) -> Credit:
    of_calls = [known.get(place) for place in places(trajectory)]
    found = [one for one in of_calls if one is not None]
    mean = statistics.fmean(found) if found else 0.0
    shares = [1.0] * len(of_calls)
    if mean > 0:
        shares = [FLOOR + (1.0 - FLOOR) * (mean if one is None else one) / mean for one in of_calls]
    return Credit(values=[share * trajectory.reward for share in shares], shares=shares)


def _squares(numbers: Sequence[float]) -> float:
    """Squares around the mean, without deviations that are its rounding: equal rewards have none."""
    mean = statistics.fmean(numbers)
    rounding = 1e-12 * max(map(abs, numbers))
    return math.fsum((one - mean) ** 2 for one in numbers if abs(one - mean) > rounding)
