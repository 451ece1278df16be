"""AIR in numbers: each rule's rewards and their agreement with the final reward, of a step or of a stored run.

`rl/load_trajectories.py` counts the rewards on record; ``agl rewards air`` those of rules over stored rollouts, the run's
own or others that somebody wants to try. Nothing is run again and nothing is written: the rules see the same record that a
worker sees as an attempt ends, so that the run's own rules say what is recorded.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.errors import NotFoundError
from agentlightning.records import Call, Mode, Reward, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import by_attempt, read_rollouts
from agentlightning.tracing.air import PREFIX, Air


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
class RuleTally:
    """Sums of one rule's rewards, or of all of them."""

    total: float = 0.0
    count: int = 0
    pairs: defaultdict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By group: its rewards of a rollout, and the rollout's own reward."""

    @property
    def agreement(self) -> float | None:
        """Correlation of the two within groups; None where one of them never differs."""
        return within_groups(self.pairs.values())


class AirTally:
    """Sums of the rules' rewards over rollouts, part by part."""

    def __init__(self, rules: Iterable[str]) -> None:
        self.rules = {name: RuleTally() for name in rules}
        self.whole = RuleTally()
        self.calls = 0

    def add(self, rollouts: Sequence[Rollout], calls: Sequence[Call], rewards: Iterable[Reward]) -> None:
        """Some rollouts with the calls of their latest attempts; other rewards than the rules' count nothing."""
        self.calls += sum(call.agent != JUDGE for call in calls)
        attempts = {rollout.id: rollout.attempt for rollout in rollouts}
        earned = {rollout.id: dict.fromkeys(self.rules, 0.0) for rollout in rollouts}
        for reward in rewards:
            name = reward.name.removeprefix(PREFIX)
            if reward.source == "air" and name in self.rules and attempts.get(reward.rollout_id) == reward.attempt:
                self.rules[name].total += reward.value
                self.rules[name].count += 1
                earned[reward.rollout_id][name] += reward.value
        for rollout in rollouts:
            if rollout.reward is not None and math.isfinite(rollout.reward):
                for name, value in earned[rollout.id].items():
                    self.rules[name].pairs[rollout.group_id].append((value, rollout.reward))
                self.whole.pairs[rollout.group_id].append((sum(earned[rollout.id].values()), rollout.reward))

    def metrics(self) -> dict[str, float]:
        """Metrics of a step by path; none without rules."""
        if not self.rules:
            return {}
        found = {f"air/{name}/reward_mean": one.total / max(1, self.calls) for name, one in self.rules.items()}
        found |= {f"air/{name}/share": one.count / max(1, self.calls) for name, one in self.rules.items()}
        agreement = self.whole.agreement
        return found if agreement is None else found | {"air/agreement": agreement}


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
    tally = AirTally(air.config.rules)
    rollouts = recorded = unlike = 0
    query = RolloutQuery(run_id=run_id, mode=mode, step=step, states=["succeeded", "failed"], limit=limit)
    async for part in read_rollouts(store, query):
        ids = [rollout.id for rollout in part]
        calls_of, spans_of = by_attempt(await store.calls(ids)), by_attempt(await store.spans(ids))
        known = by_attempt(reward for reward in await store.rewards(ids) if reward.source == "air")
        for rollout in part:
            key = rollout.id, rollout.attempt
            said = air.rewards(calls_of[key], spans_of[key])
            own = [reward for reward in known[key] if reward.name.removeprefix(PREFIX) in tally.rules]
            unlike += len({(one.id, one.value) for one in said} ^ {(one.id, one.value) for one in own})
            recorded += len(own)
            rollouts += 1
            tally.add([rollout], calls_of[key], said)
    if not rollouts:
        raise NotFoundError(f"{run_id}: no rollout that has finished matches")
    return AirReport(
        rollouts=rollouts,
        calls=tally.calls,
        rules=[
            RuleReport(
                rule=name,
                share=one.count / max(1, tally.calls),
                a_call=one.total / max(1, tally.calls),
                a_rollout=one.total / rollouts,
                agreement=one.agreement,
            )
            for name, one in tally.rules.items()
        ],
        agreement=tally.whole.agreement,
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
