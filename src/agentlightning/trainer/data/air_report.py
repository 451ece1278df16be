"""AIR report: rules over stored rollouts, the run's own or others that somebody wants to try.

Driven by ``agl rewards air``. Nothing is run again and nothing is written: the rules see the same record that a worker sees
as an attempt ends, so that the run's own rules say what is recorded.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import read_rollouts
from agentlightning.tracing.air import PREFIX, Air
from agentlightning.types import Call, Mode, Reward, Rollout, Span

R = TypeVar("R", Call, Span, Reward)

"""Rollouts whose calls are read at a time: bounds memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleReport:
    """Rewards of one rule over a run."""

    rule: str
    share: float
    """Of the calls: those that it speaks of."""
    a_call: float
    """Its mean reward per call."""
    a_rollout: float
    """Its mean reward a rollout."""
    agreement: float | None
    """Correlation of a rollout's sum with its final reward, within groups; None where one of them never differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AirReport:
    """Rewards of rules over a run."""

    rollouts: int
    calls: int
    rules: list[RuleReport]
    agreement: float | None
    """Of all rules together."""
    recorded: int
    """Rewards of these rules that the run has on record."""
    unlike_record: int
    """Rewards, said or recorded, that are not the same in both."""


@dataclass(slots=True)
class _Tally:
    sum: float = 0.0
    count: int = 0
    pairs: defaultdict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By group: what it gave a rollout, and the rollout's own reward."""


async def report_air(
    store: LightningStore,
    run_id: str,
    air: Air,
    *,
    mode: Mode | None = None,
    step: int | None = None,
    limit: int | None = None,
) -> AirReport:
    """The rules over the finished rollouts of a run, their latest attempts. NotFoundError where there is none; AgentError
    where a rule of the user's own fails."""
    names = list(air.config.rules)
    tallies = {name: _Tally() for name in names}
    whole = _Tally()
    rollouts = calls = recorded = unlike = 0
    query = RolloutQuery(run_id=run_id, mode=mode, step=step, states=["succeeded", "failed"], limit=limit)
    async for part in read_rollouts(store, query):
        ids = [rollout.id for rollout in part]
        calls_of, spans_of = _by_attempt(await store.calls(ids)), _by_attempt(await store.spans(ids))
        known = _by_attempt(reward for reward in await store.rewards(ids) if reward.source == "air")
        for rollout in part:
            key = rollout.id, rollout.attempt
            said = air.rewards(calls_of[key], spans_of[key])
            own = [reward for reward in known[key] if reward.name.removeprefix(PREFIX) in tallies]
            unlike += len({(one.id, one.value) for one in said} ^ {(one.id, one.value) for one in own})
            recorded += len(own)
            rollouts += 1
            calls += sum(call.agent != JUDGE for call in calls_of[key])
            _add(tallies, whole, rollout, said)
    if not rollouts:
        raise NotFoundError(f"{run_id}: no rollout that has finished matches")
    return AirReport(
        rollouts=rollouts,
        calls=calls,
        rules=[
            RuleReport(
                rule=name,
                share=one.count / max(1, calls),
                a_call=one.sum / max(1, calls),
                a_rollout=one.sum / rollouts,
                agreement=within_groups(one.pairs.values()),
            )
            for name, one in tallies.items()
        ],
        agreement=within_groups(whole.pairs.values()),
        recorded=recorded,
        unlike_record=unlike,
    )


def within_groups(pairs: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Pearson's correlation of two numbers less their groups' means; None where one of them is the same throughout.

    >>> within_groups([[(1.0, 10.0), (2.0, 30.0)], [(5.0, 0.0), (5.0, 9.0)]])
    0.912...
    """
    xs: list[float] = []
    ys: list[float] = []
    for group in pairs:
        x0, y0 = statistics.fmean(x for x, _ in group), statistics.fmean(y for _, y in group)
        xs += [x - x0 for x, _ in group]
        ys += [y - y0 for _, y in group]
    scale = math.sqrt(math.fsum(x * x for x in xs) * math.fsum(y * y for y in ys))
    return math.fsum(x * y for x, y in zip(xs, ys, strict=True)) / scale if scale > 1e-9 else None


def _add(tallies: dict[str, _Tally], whole: _Tally, rollout: Rollout, said: Sequence[Reward]) -> None:
    earned = dict.fromkeys(tallies, 0.0)
    for reward in said:
        name = reward.name.removeprefix(PREFIX)
        earned[name] += reward.value
        tallies[name].count += 1
    for name, value in earned.items():
        tallies[name].sum += value
    if rollout.reward is None:
        return
    for name, value in earned.items():
        tallies[name].pairs[rollout.group_id].append((value, rollout.reward))
    whole.pairs[rollout.group_id].append((sum(earned.values()), rollout.reward))


def _by_attempt(records: Iterable[R]) -> defaultdict[tuple[str, int], list[R]]:
    found: defaultdict[tuple[str, int], list[R]] = defaultdict(list)
    for record in records:
        found[record.rollout_id, record.attempt].append(record)
    return found
