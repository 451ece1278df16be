"""Step inputs: the calls and rewards of rollouts as a training step reads them, the first time and ever after.

Whatever learns from a step's rollouts reads them here: the step itself, later steps that look back at it, checks of a run.
What the first reading found is written into the step's list when it opens (`ConsumedInputs`), call by call, and from then on
counts: a call whose agent had gone may be recorded after its rollout ended, and spans and rewards may come at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentlightning.adapters.trajectories import counts
from agentlightning.errors import ConflictError
from agentlightning.records import Call, ConsumedInputs, Outcome, Reward, Rollout, Step
from agentlightning.store.base import LightningStore
from agentlightning.store.scan import by_attempt
from agentlightning.tracing.agent_names import named_calls

DISCARDED: frozenset[Outcome] = frozenset({"stale", "overprovisioned"})
"""Outcomes of rollouts that a step consumes without learning from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The records of some rollouts."""

    calls: list[Call]
    """All calls of their latest attempts. Those that are learned from are `delivered`, and those that repeat what was
    sampled for another rollout; what the others hold is context."""
    rewards: list[Reward]
    """Those that count."""
    consumed: dict[str, ConsumedInputs]
    """By rollout: which of these it is learned from."""

    @property
    def delivered(self) -> list[Call]:
        """The calls that are learned from."""
        return [call for call in self.calls if call.learnable]


def fixed_inputs(step: Step) -> dict[str, ConsumedInputs]:
    """By rollout, what a step that was opened learns from; without those of which its list does not say it."""
    return {one.rollout_id: one.inputs for one in step.consumed if one.inputs is not None}


def with_failures(rollouts: Sequence[Rollout], on_failure: Literal["drop", "zero"]) -> list[Rollout]:
    """The rollouts as a step learns from them: where failures count as zero, those that failed have that reward."""
    if on_failure == "drop":
        return [*rollouts]
    return [one if one.state == "succeeded" else replace(one, reward=0.0) for one in rollouts]


async def read_inputs(
    store: LightningStore, rollouts: Sequence[Rollout], fixed: Mapping[str, ConsumedInputs]
) -> StepInputs:
    """The records of these rollouts: those that are `fixed`, and of other rollouts all that is there now.

    ConflictError where one that is fixed is not recorded any more.
    """
    ids = [rollout.id for rollout in rollouts]
    recorded, rewards = by_attempt(await store.calls(ids)), by_attempt(await store.rewards(ids))
    unread = [call for calls in recorded.values() for call in calls if call.rollout_id not in fixed]
    named = by_attempt(await named_calls(store, unread))
    found = StepInputs(calls=[], rewards=[], consumed={})
    for rollout in rollouts:
        place = rollout.id, rollout.attempt
        told = [reward for reward in rewards[place] if counts(reward, rollout)]
        inputs = fixed.get(rollout.id)
        if inputs is None:
            inputs = _inputs(rollout, recorded[place], named[place], told)
        _check_present(rollout, inputs, recorded[place], rewards[place])
        agents, calls, kept = dict(inputs.agents), {*inputs.calls, *inputs.replayed}, set(inputs.rewards)
        found.calls.extend(
            replace(call, delivered=call.id in calls, agent=agents.get(call.id, call.agent)) for call in recorded[place]
        )
        found.rewards.extend(reward for reward in rewards[place] if reward.id in kept)
        found.consumed[rollout.id] = inputs
    return found


def _inputs(rollout: Rollout, calls: Sequence[Call], named: Sequence[Call], told: Sequence[Reward]) -> ConsumedInputs:
    names = {call.id: call.agent for call in named if call.agent is not None}
    return ConsumedInputs(
        attempt=rollout.attempt,
        calls=[call.id for call in calls if call.learnable],
        rewards=[reward.id for reward in told],
        agents=[(call.id, names[call.id]) for call in calls if call.agent is None and call.id in names],
        replayed=[call.id for call in calls if call.shared],
    )


def _check_present(rollout: Rollout, inputs: ConsumedInputs, calls: Sequence[Call], rewards: Sequence[Reward]) -> None:
    if rollout.attempt != inputs.attempt:
        raise _gone(rollout, f"attempt {inputs.attempt}, its latest one is {rollout.attempt}")
    _check_all("call", rollout, [*inputs.calls, *inputs.replayed], {call.id for call in calls})
    _check_all("reward", rollout, inputs.rewards, {reward.id for reward in rewards})


def _check_all(what: str, rollout: Rollout, wanted: Sequence[str], known: Collection[str]) -> None:
    missing = [each for each in wanted if each not in known]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise _gone(rollout, f"{what} {missing[0]}{others}, no longer recorded (were records pruned or deleted?)")


def _gone(rollout: Rollout, what: str) -> ConflictError:
    return ConflictError(f"rollout {rollout.id}: a step of run {rollout.run_id} learned from {what}")
