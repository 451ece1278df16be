"""AIR in numbers: each rule's rewards, of a step or of a stored run.

`rl/load_trajectories.py` counts the rewards on record; ``agl rewards air`` those of rules over stored rollouts, the run's
own or others that somebody wants to try. Nothing is run again and nothing is written: the rules see the same record that a
worker sees as an attempt ends, so that the run's own rules say what is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AirReport:
    """Rewards of rules over a run."""

    rollouts: int
    calls: int
    rules: list[RuleReport]
    recorded: int
    """Rewards of these rules that the run has on record."""
    unlike_record: int
    """Rewards, said or recorded, that are not the same in both."""


@dataclass(slots=True)
class RuleTally:
    """Sums of one rule's rewards."""

    total: float = 0.0
    count: int = 0


class AirTally:
    """Sums of the rules' rewards over rollouts, part by part."""

    def __init__(self, rules: Iterable[str]) -> None:
        self.rules = {name: RuleTally() for name in rules}
        self.calls = 0

    def add(self, rollouts: Sequence[Rollout], calls: Sequence[Call], rewards: Iterable[Reward]) -> None:
        """Some rollouts with the calls of their latest attempts; other rewards than the rules' count nothing."""
        self.calls += sum(call.agent != JUDGE for call in calls)
        attempts = {rollout.id: rollout.attempt for rollout in rollouts}
        for reward in rewards:
            name = reward.name.removeprefix(PREFIX)
            if reward.source == "air" and name in self.rules and attempts.get(reward.rollout_id) == reward.attempt:
                self.rules[name].total += reward.value
                self.rules[name].count += 1

    def metrics(self) -> dict[str, float]:
        """Metrics of a step by path; none without rules."""
        found = {f"air/{name}/reward_mean": one.total / max(1, self.calls) for name, one in self.rules.items()}
        return found | {f"air/{name}/share": one.count / max(1, self.calls) for name, one in self.rules.items()}


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
            )
            for name, one in tally.rules.items()
        ],
        recorded=recorded,
        unlike_record=unlike,
    )
