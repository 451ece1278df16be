"""Reward statistics: distributions by reward, step and call, and where two rewards disagree.

``agl rewards report``, ``agl rewards report --compare`` and the console's page drive it. Pure, over `RewardedRollout`s.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentlightning.analysis.intervals import Interval, correlation, rank_correlation, ranks
from agentlightning.analysis.rewarded_rollouts import RewardedRollout
from agentlightning.errors import InputError

BINS = 20
SHOWN = 10
"""Rollouts that disagree most, as many as are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardDistribution:
    """The values of one reward in one step."""

    name: str
    step: int
    call: int | None
    """Place of the call from 1 that it was given to; None: it is a final reward."""
    n: int
    mean: float
    deviation: float
    """Sample deviation; 0 for one value."""
    quartiles: tuple[float, float, float, float, float]
    """Lowest, first quartile, median, third quartile, highest."""
    bins: list[int]
    """Counts in BINS equal parts from the lowest to the highest; all in the first where all are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisagreeingRollout:
    """A rollout that two rewards place differently among the others."""

    rollout_id: str
    step: int
    values: tuple[float, float]
    places: tuple[float, float]
    """Share of the rollouts that it earns more than, by each reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Two rewards over the rollouts that have both."""

    names: tuple[str, str]
    rollouts: int
    correlation: Interval | None
    """Spearman's."""
    within_groups: Interval | None
    """The same of ranks within each group, which is what advantages see."""
    most: list[DisagreeingRollout]
    """Those that the two place furthest apart."""


def distributions(rollouts: Iterable[RewardedRollout]) -> list[RewardDistribution]:
    """One for each reward, step and place of a call, in this order; final rewards first."""
    values: defaultdict[tuple[str, int, int], list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            values[name, rollout.step, 0].append(value)
        for place, name, value in rollout.step_rewards:
            values[name, rollout.step, place].append(value)
    order = sorted(values, key=lambda key: (key[2] > 0, key[0], key[1], key[2]))
    return [_distribution(name, step, place or None, values[name, step, place]) for name, step, place in order]


def _distribution(name: str, step: int, call: int | None, values: list[float]) -> RewardDistribution:
    low, high = min(values), max(values)
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    bins = [0] * BINS
    for value in values:
        bins[min(BINS - 1, int((value - low) / (high - low) * BINS)) if high > low else 0] += 1
    return RewardDistribution(
        name=name,
        step=step,
        call=call,
        n=len(values),
        mean=statistics.fmean(values),
        deviation=statistics.stdev(values) if len(values) > 1 else 0.0,
        quartiles=(low, first, middle, third, high),
        bins=bins,
    )


def disagreement(rollouts: Sequence[RewardedRollout], name: str, other: str) -> Disagreement:
    """Compares how two rewards order the same rollouts. InputError where fewer than two rollouts have both."""
    both = [one for one in rollouts if name in one.rewards and other in one.rewards]
    if len(both) < 2:
        known = sorted({reward for one in rollouts for reward in one.rewards})
        raise InputError(
            f"rewards: expected two of {', '.join(known) or 'none'} that rollouts have both of, got {name} and {other}"
        )
    values = [[one.rewards[key] for one in both] for key in (name, other)]
    placed = [[(rank - 1) / (len(both) - 1) for rank in ranks(column)] for column in values]
    order = sorted(range(len(both)), key=lambda at: (-abs(placed[0][at] - placed[1][at]), both[at].rollout_id))
    return Disagreement(
        names=(name, other),
        rollouts=len(both),
        correlation=rank_correlation(*values),
        within_groups=_rank_correlation_within(both, values),
        most=[
            DisagreeingRollout(
                rollout_id=both[at].rollout_id,
                step=both[at].step,
                values=(values[0][at], values[1][at]),
                places=(placed[0][at], placed[1][at]),
            )
            for at in order[:SHOWN]
            if placed[0][at] != placed[1][at]
        ],
    )


def _rank_correlation_within(both: Sequence[RewardedRollout], values: Sequence[Sequence[float]]) -> Interval | None:
    members: defaultdict[str, list[int]] = defaultdict(list)
    for place, one in enumerate(both):
        members[one.group_id].append(place)
    columns: list[list[float]] = [[], []]
    for places in members.values():
        for column, numbers in zip(columns, values, strict=True):
            own = ranks([numbers[place] for place in places])
            column += [rank - (len(places) + 1) / 2 for rank in own]
    return correlation(columns[0], columns[1], len(both) - len(members))
