"""Reward debugger: how one rollout's reward became advantages, and what other rules would have made of a stored step.

``agl rewards explain``, ``agl rewards what-if`` and the console's page drive it. Credit and advantages are those of the
algorithm's own plan (`LightningRL.plan`), over the rollouts as training read them. It writes nothing. What
another reward function says of stored rollouts is for ``agl rewards rescore``.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentlightning.algorithms.advantage import ADVANTAGES, WHITENED
from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.plugins import own_code
from agentlightning.algorithms.settings import as_table, name_of
from agentlightning.analysis.step_record import StepRecord, read_step
from agentlightning.errors import ConfigError, InputError, NotFoundError
from agentlightning.records import Outcome, Rollout
from agentlightning.runtime.code_loader import only_named_code
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import read_steps
from agentlightning.training_types import Trajectory

MAX_STEPS_AHEAD = 100
"""Steps after the one that a rollout was enqueued for, within which the one that consumed it is looked for."""
SMALL = 1e-9
"""An advantage below it has no sign."""
WITHOUT_MEAN = ("reinforce", "reinforce_pp")
"""Advantages that subtract no mean of the group's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAdvantage:
    """Credit and advantage of one call."""

    call_id: str
    place: int
    """Among the rollout's own calls, from 1."""
    agent: str | None
    tokens: int
    """Trained tokens; each has the call's advantage."""
    step_reward: float
    credit: float
    advantage: float
    """The mean over its tokens, where they have one each."""
    share: float
    """The share of the group's mean that is subtracted from the credit; 0 where the credit is a difference already."""
    bonus: float
    """The part of the advantage that the credit rule added as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAdvantage:
    """One rollout of a step as an algorithm sees it."""

    rollout_id: str
    group_id: str
    reward: float | None
    """As the algorithm weighs it; None where it is not known."""
    score: float | None
    """The number by which it is compared with its group: the reward, unless the credit rule names another."""
    outcome: Outcome
    calls: list[CallAdvantage]
    """None where the outcome is invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardExplanation:
    """The way from the recorded rewards of a rollout to the advantages of its calls."""

    run_id: str
    step: int
    consumed: bool
    policy: str
    rollout: RolloutAdvantage
    group: dict[str, float | None]
    """Reward of each rollout of its group."""
    lines: list[str]
    """The same in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardChange:
    """Another way to reward the rollouts of a step. None leaves a part as the run has it."""

    credit: str | None = None
    credit_settings: Mapping[str, Any] | None = None
    advantage: str | None = None
    weights: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChange:
    """One call under both. None where it has no advantage (its rollout is invalid, or the run's came from a critic)."""

    rollout_id: str
    group_id: str
    call_id: str
    place: int
    agent: str | None
    tokens: int
    credit_before: float | None
    credit_after: float | None
    advantage_before: float | None
    advantage_after: float | None

    @property
    def change(self) -> float:
        return (self.advantage_after or 0.0) - (self.advantage_before or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfReport:
    """A step as it was learned from, and as it would be."""

    run_id: str
    step: int
    policy: str
    before: dict[str, Any]
    after: dict[str, Any]
    """Settings that differ."""
    rewards: dict[str, tuple[float | None, float | None]]
    """Of each rollout, before and after."""
    outcomes: dict[str, tuple[Outcome | None, Outcome]]
    calls: list[CallChange]
    """In the order of the rollouts."""
    turned: float | None
    """Share of calls whose advantage would get another sign, get one or lose it."""
    moved: float | None
    """The mean change of an advantage over their mean size."""
    tokens_turned: int = 0
    """Trained tokens of the calls that turn."""


async def explain_rollout(
    store: LightningStore, rollout_id: str, policy: str | None = None, trust_run: bool = False
) -> RewardExplanation:
    """The calculation of one rollout's credit and advantages. NotFoundError where there is no such rollout; ConfigError
    where its advantages are in no store (a critic's, a judge's), or the run names code of its own without `trust_run`."""
    with only_named_code(trust_run=trust_run):
        return await _explained(store, rollout_id, policy)


async def _explained(store: LightningStore, rollout_id: str, policy: str | None) -> RewardExplanation:
    found = await store.rollouts(RolloutQuery(ids=[rollout_id]))
    if not found:
        raise NotFoundError(f"{rollout_id}: no such rollout; see: agl rollouts list RUN")
    rollout = found[0]
    if rollout.mode != "train":
        raise ConfigError(f"{rollout_id}: is an evaluation, which nothing is learned from; expected a training rollout")
    step = await consuming_step(store, rollout)
    record = await read_step(store, rollout.run_id, rollout.step if step is None else step, policy, step is not None)
    advantages = await _advantages(store, record, record.algorithm, record.groups)
    own = advantages.get(rollout_id)
    if own is None:
        raise NotFoundError(
            f"{rollout_id}: step {record.step} learned nothing from it: it failed, or has no call of {record.policy!r}"
        )
    members = [one for one in advantages.values() if one.group_id == own.group_id]
    trajectory = next(one for members in record.groups for one in members if one.rollout_id == rollout_id)
    return RewardExplanation(
        run_id=rollout.run_id,
        step=record.step,
        consumed=record.consumed,
        policy=record.policy,
        rollout=own,
        group={one.rollout_id: one.reward for one in members},
        lines=_in_words(record, trajectory, own, members),
    )


async def what_if(
    store: LightningStore,
    run_id: str,
    step: int,
    change: RewardChange,
    policy: str | None = None,
    trust_run: bool = False,
) -> WhatIfReport:
    """The step's rollouts under the change: reward, credit and advantage of each call, before anything is trained.

    ConfigError where a part of the change is wrong, where it needs a critic or a judge, or where the run names code of its
    own that the change does not name, without `trust_run`.
    """
    given = [one for one in (change.credit_settings or {}).values() if isinstance(one, str)]
    with only_named_code(change.credit, change.advantage, *given, trust_run=trust_run):
        return await _what_if(store, run_id, step, change, policy)


async def _what_if(
    store: LightningStore, run_id: str, step: int, change: RewardChange, policy: str | None
) -> WhatIfReport:
    record = await read_step(store, run_id, step, policy)
    changed = changed_algorithm(record.algorithm, change)
    _check_weights(change, record.groups)
    try:
        after = await _advantages(store, record, changed, record.groups)
    except OverflowError:
        raise InputError("the change: expected weights of rewards that can be added up, these are too large") from None
    needs_engine = _engine_part(record.algorithm) is not None
    before = {} if needs_engine else await _advantages(store, record, record.algorithm, record.groups)
    calls = [call for key, one in after.items() for call in _call_changes(before.get(key), one)]
    compared = [one for one in calls if None not in (one.advantage_before, one.advantage_after)]
    size = math.fsum(max(abs(one.advantage_before or 0.0), abs(one.advantage_after or 0.0)) for one in compared)
    turned = [one for one in compared if _sign(one.advantage_before) != _sign(one.advantage_after)]
    was, now = as_table(record.algorithm), as_table(changed)
    differ = [name for name in was if was[name] != now[name]]
    return WhatIfReport(
        run_id=run_id,
        step=step,
        policy=record.policy,
        before={name: was[name] for name in differ},
        after={name: now[name] for name in differ},
        rewards={key: (before[key].reward if key in before else None, one.reward) for key, one in after.items()},
        outcomes={key: (before[key].outcome if key in before else None, one.outcome) for key, one in after.items()},
        calls=calls,
        turned=len(turned) / len(compared) if compared else None,
        moved=math.fsum(abs(one.change) for one in compared) / size if size else None,
        tokens_turned=sum(one.tokens for one in turned),
    )


def changed_algorithm(algorithm: LightningRL, change: RewardChange) -> LightningRL:
    """The algorithm with the change; a part that is named anew has its own defaults. ConfigError where it is wrong."""
    changes: dict[str, Any] = {}
    if change.advantage is not None and change.advantage != name_of(algorithm.advantage):
        changes["advantage"] = change.advantage
    rule = algorithm.rule.path if change.credit is None else change.credit
    if rule != algorithm.rule.path or change.credit_settings is not None:
        changes["credit"] = {"type": rule, **(change.credit_settings or {})}
        if algorithm.tree is not None:  # another rule sees its rollouts as if they shared nothing
            changes["rollouts"] = "independent"
    if change.weights is not None:
        changes["reward_weights"] = dict(change.weights)
    if not changes:
        raise ConfigError("what-if: expected a credit rule, an advantage or weights, got none")
    return replace(algorithm, **changes)


def _check_weights(change: RewardChange, groups: Sequence[Sequence[Trajectory]]) -> None:
    """ConfigError where a weight is given to a reward that no rollout has: no rollout would have a reward then."""
    known = {name for members in groups for trajectory in members for name in trajectory.rewards}
    unknown = sorted(set(change.weights or ()) - known)
    if unknown and known:
        raise ConfigError(
            f"weights: expected names of {', '.join(sorted(known))}, got {', '.join(unknown)[:200]}, which no rollout has"
        )


async def _advantages(
    store: LightningStore, record: StepRecord, algorithm: LightningRL, groups: Sequence[Sequence[Trajectory]]
) -> dict[str, RolloutAdvantage]:
    """By rollout, in the order of the groups, what the algorithm's plan makes of them."""
    if (part := _engine_part(algorithm)) is not None:
        raise ConfigError(
            f"{part}, which is in no store; expected an advantage of rewards alone: {', '.join(ADVANTAGES)}"
        )
    evidence = await record.evidence(store, algorithm)
    # In a thread: the console's event loop serves other pages meanwhile.
    return await asyncio.to_thread(_planned, algorithm, groups, evidence)


def _planned(
    algorithm: LightningRL, groups: Sequence[Sequence[Trajectory]], evidence: Evidence
) -> dict[str, RolloutAdvantage]:
    with own_code(algorithm):
        plan = algorithm.plan(groups, seed=0, evidence=evidence)
    rewards = {one.rollout_id: one.reward for group in algorithm.settled(groups) for one in group}
    calls: dict[str, list[CallAdvantage]] = {}
    scores = {one.rollout_id: one.score for one in plan.calls if one.score is not None}
    for one in plan.calls:
        of_rollout = calls.setdefault(one.rollout_id, [])
        advantage = one.advantages if isinstance(one.advantages, float | int) else statistics.fmean(one.advantages)
        of_rollout.append(
            CallAdvantage(
                call_id=one.call.call_id,
                place=len(of_rollout) + 1,
                agent=one.call.agent,
                tokens=one.call.trained_tokens,
                step_reward=one.call.reward,
                credit=one.credit,
                advantage=advantage,
                share=one.share,
                bonus=one.bonus,
            )
        )
    return {
        one.rollout_id: RolloutAdvantage(
            rollout_id=one.rollout_id,
            group_id=one.group_id,
            reward=rewards.get(one.rollout_id),
            score=scores.get(one.rollout_id, rewards.get(one.rollout_id)),
            outcome=plan.outcomes[one.rollout_id],
            calls=calls.get(one.rollout_id, []),
        )
        for group in groups
        for one in group
    }


def _engine_part(algorithm: LightningRL) -> str | None:
    if algorithm.critic is not None:
        return "advantage: 'gae' takes a critic's values"
    return (
        "kl: with reinforce_pp every token is rewarded by the reference's log-probability"
        if algorithm.kl_in_reward
        else None
    )


def _call_changes(before: RolloutAdvantage | None, after: RolloutAdvantage) -> list[CallChange]:
    """The calls that have an advantage before or after."""
    old = {call.call_id: call for call in before.calls} if before is not None else {}
    new = {call.call_id: call for call in after.calls}
    found = []
    for call_id, one in (old | new).items():
        was, now = old.get(call_id), new.get(call_id)
        found.append(
            CallChange(
                rollout_id=after.rollout_id,
                group_id=after.group_id,
                call_id=call_id,
                place=one.place,
                agent=one.agent,
                tokens=one.tokens,
                credit_before=None if was is None else was.credit,
                credit_after=None if now is None else now.credit,
                advantage_before=None if was is None else was.advantage,
                advantage_after=None if now is None else now.advantage,
            )
        )
    return found


async def consuming_step(store: LightningStore, rollout: Rollout) -> int | None:
    """The step whose list has the rollout, at the earliest the one that it was enqueued for; None where none has."""
    if rollout.outcome is None:
        return None
    async for page in read_steps(store, rollout.run_id, rollout.step - 1):
        for step in page:
            if any(one.rollout_id == rollout.id for one in step.consumed):
                return step.step
        if page[-1].step > rollout.step + MAX_STEPS_AHEAD:
            break
    return None


def _in_words(
    record: StepRecord, trajectory: Trajectory, own: RolloutAdvantage, members: Sequence[RolloutAdvantage]
) -> list[str]:
    algorithm, rule, advantage = record.algorithm, record.algorithm.rule, name_of(record.algorithm.advantage)
    lines = [_reward_line(algorithm, trajectory, own.reward)]
    compared = [(one.reward, one.score) for one in members if one.reward is not None and one.score is not None]
    rewards, scores = [reward for reward, _ in compared], [score for _, score in compared]
    if rewards:
        count = f"{len(rewards)} rollout{'s' if len(rewards) > 1 else ''}"
        lines.append(f"group {own.group_id}: {count} with rewards {_spread(rewards)}")
    if any(abs(score - reward) > SMALL for reward, score in compared):
        lines.append(f"  the credit rule compares them by returns of their own instead of rewards: {_spread(scores)}")
    settings = algorithm.rule_settings
    given = f" ({', '.join(f'{name} = {value!r}' for name, value in settings.items())})" if settings else ""
    lines.append(f"credit {rule.name}{given}: {_summary(rule.function)}")
    lines += [
        f"  call {call.place}{f' by {call.agent}' if call.agent else ''}: "
        + (f"step reward {call.step_reward:g}, " if call.step_reward else "")
        + f"credit {call.credit:.4g}{_compared_with(algorithm, call)}"
        for call in own.calls
    ]
    formula = _summary(ADVANTAGES[advantage]) if advantage in ADVANTAGES else "a plug-in"
    lines.append(f"advantage {advantage}: {formula}")
    if advantage in WHITENED:
        lines.append("  then (value - mean) / standard deviation, over all sampled tokens of the step")
    if algorithm.solved_bonus:
        lines.append(f"  and solved_bonus × reward: {algorithm.solved_bonus:g} × {own.reward or 0.0:g}")
    lines += [
        f"  call {call.place}: {call.advantage:+.4g} on each of {call.tokens} trained tokens"
        + (f", {call.bonus:+.4g} of it added by the credit rule" if call.bonus else "")
        for call in own.calls
    ]
    lines.append(
        f"outcome: {own.outcome}" + ("" if record.consumed else ", if the step were learned from as it is now")
    )
    return lines


def _reward_line(algorithm: LightningRL, trajectory: Trajectory, reward: float | None) -> str:
    total = "not known" if reward is None or not math.isfinite(reward) else f"{reward:.4g}"
    if not algorithm.reward_weights or trajectory.failed:
        named = ", ".join(f"{name} {value:g}" for name, value in trajectory.rewards.items() if name != "reward")
        return f"reward: {total}" + (f" (also recorded: {named})" if named else "")
    terms = " + ".join(
        f"{weight:g} × {name} {trajectory.rewards.get(name, math.nan):g}"
        for name, weight in algorithm.reward_weights.items()
    )
    return f"reward: {terms} = {total}"


def _spread(values: Sequence[float]) -> str:
    ordered = ", ".join(f"{value:.6g}" for value in sorted(values, reverse=True))
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{ordered}; mean {statistics.fmean(values):.4g}, standard deviation {deviation:.4g}"


def _compared_with(algorithm: LightningRL, call: CallAdvantage) -> str:
    """Words for a credit from which not the whole mean of the group is subtracted; none for advantages without a mean."""
    advantage = name_of(algorithm.advantage)
    if call.share == 1 or advantage not in ADVANTAGES or advantage in WITHOUT_MEAN:
        return ""
    return f", from which {f'{call.share:.4g} of the' if call.share else 'no'} mean is subtracted"


def _summary(function: object) -> str:
    """The first paragraph of what a function says of itself, without the worked example: the lines have their own."""
    text = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    return re.split(r": (?=a rollout of|three calls|\[)", text)[0]


def _sign(number: float | None) -> int:
    return 0 if number is None or abs(number) < SMALL else 1 if number > 0 else -1
