"""Rewarded rollouts: the rewards of some steps of a stored run by name and call, with the lengths of their rollouts.

The distribution of rewards, their disagreement and the search for hacks read them here, a step at a time, so that a run of a
million rollouts costs no more than one of a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentlightning.adapters.trajectories import JUDGE, final_rewards, named_rewards
from agentlightning.errors import NotFoundError
from agentlightning.records import Call, Reward, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.forks import is_apart
from agentlightning.store.scan import by_attempt, find_run, read_rollouts

OWN = "reward"
"""Name of a rollout's own final reward."""
MAX_ROLLOUTS = 2000
"""Rollouts of a step that are looked at, the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedRollout:
    """One finished training rollout and its rewards."""

    rollout_id: str
    group_id: str
    step: int
    rewards: dict[str, float]
    """Final rewards by name, what it was rescored with included; its own is OWN."""
    step_rewards: list[tuple[int, str, float]] = field(default_factory=list)
    """Place of the call from 1, name and value; only where calls were read."""
    turns: int
    """Model calls."""
    tokens: int = 0
    """Sampled tokens; only where calls were read."""


async def read_rewarded(
    store: LightningStore, run_id: str, steps: Sequence[int], *, calls: bool = False, limit: int = MAX_ROLLOUTS
) -> list[RewardedRollout]:
    """The rollouts enqueued for these steps that succeeded, at most `limit` of a step. With `calls` their calls are read,
    too, which takes longer.

    NotFoundError where there is none.
    """
    found: list[RewardedRollout] = []
    for step in steps:
        query = RolloutQuery(run_id=run_id, step=step, mode="train", states=["succeeded"], limit=limit)
        async for listed in read_rollouts(store, query):
            page = [one for one in listed if not is_apart(one)]
            ids = [rollout.id for rollout in page]
            rewards = by_attempt(await store.rewards(ids))
            calls_of = by_attempt(await store.calls(ids)) if calls else {}
            for rollout in page:
                key = rollout.id, rollout.attempt
                found.append(_rewarded(rollout, rewards[key], calls_of.get(key, [])))
    if not found:
        raise NotFoundError(f"{run_id}: no training rollout of step {', '.join(map(str, steps))} has succeeded")
    return found


async def latest_steps(store: LightningStore, run_id: str, count: int, spread: bool = False) -> list[int]:
    """The last steps of a run that were trained; with `spread`, as many over the whole run.

    NotFoundError where none was.
    """
    last = (await find_run(store, run_id)).summary.get("step")
    if not isinstance(last, int) or last < 1:
        raise NotFoundError(f"{run_id}: has no training step yet")
    if not spread or last <= count:
        return list(range(max(1, last - count + 1), last + 1))
    return sorted({1 + round(place * (last - 1) / (count - 1)) for place in range(count)})


def _rewarded(rollout: Rollout, rewards: Sequence[Reward], calls: Sequence[Call]) -> RewardedRollout:
    told = [reward for reward in rewards if reward.source != "rescored"]
    rescored = {reward.name for reward in rewards if reward.source == "rescored" and reward.call_id is None}
    named = final_rewards(told) | {name: value for name in rescored for value in named_rewards(rewards, name).values()}
    named |= {} if rollout.reward is None else {OWN: rollout.reward}
    own = [call for call in calls if call.agent != JUDGE]
    places = {call.id: place for place, call in enumerate(own, 1)}
    return RewardedRollout(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        step=rollout.step,
        rewards=named,
        step_rewards=[
            (places[reward.call_id], reward.name, reward.value)
            for reward in rewards
            if reward.call_id is not None and reward.call_id in places
        ],
        turns=len(own) if calls else rollout.calls,
        tokens=sum(len(call.sampled_ids) or int(call.usage.get("sampled_tokens") or 0) for call in own),
    )
