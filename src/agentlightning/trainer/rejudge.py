"""What AIR's rules say of rollouts that are stored: the run's own rules, or others that somebody wants to try.

Driven by ``agl rewards air``. Nothing is run again and nothing is written: the rules see the same record that a worker sees
as an attempt ends, so that the run's own rules say what is recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.tracing.air import PREFIX, Air
from agentlightning.trainer.air import within_groups
from agentlightning.types import Call, Mode, Reward, Rollout, Span

R = TypeVar("R", Call, Span, Reward)

READ_BATCH = 128
"""Rollouts whose calls are read at a time: bounds memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleReport:
    """What one rule says of a run."""

    rule: str
    share: float
    """Of the calls: those that it speaks of."""
    a_call: float
    """Its mean reward a call."""
    a_rollout: float
    """Its mean reward a rollout."""
    agreement: float | None
    """Correlation of a rollout's sum with its final reward, within groups; None where one of them never differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AirReport:
    """What rules say of a run."""

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


async def judge_again(
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
    async for part in _parts(store, run_id, mode, step, limit):
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


async def _parts(
    store: LightningStore, run_id: str, mode: Mode | None, step: int | None, limit: int | None
) -> AsyncIterator[list[Rollout]]:
    after: str | None = None
    left = limit
    while left is None or left > 0:
        query = RolloutQuery(
            run_id=run_id,
            mode=mode,
            step=step,
            states=["succeeded", "failed"],
            after=after,
            limit=READ_BATCH if left is None else min(left, READ_BATCH),
        )
        part = await store.rollouts(query)
        if not part:
            return
        yield part
        after = part[-1].id
        left = None if left is None else left - len(part)


def _by_attempt(records: Iterable[R]) -> defaultdict[tuple[str, int], list[R]]:
    found: defaultdict[tuple[str, int], list[R]] = defaultdict(list)
    for record in records:
        found[record.rollout_id, record.attempt].append(record)
    return found
