"""Forks: rollouts that continue a recorded one after some of its calls.

A fork's agent is started anew. The gateway answers its first calls from the record, where they are the recorded ones, and
samples from then on (gateway/replay.py), so that an agent of which nothing is known comes back into a state in which it was.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.errors import InputError, NotFoundError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.types import ABANDONED, FINAL_STATES, Call, Fork, NewRollout

Choices = list[Call]
"""The samples of one request, the first of them first."""


async def new_forks(store: LightningStore, rollout_id: str, calls: int, count: int = 1) -> list[NewRollout]:
    """Make rollouts to enqueue, a group of `count`, that continue the latest attempt of a finished rollout after its first
    `calls` model calls: with its task, mode, sampling and versions of prompts.

    NotFoundError where there is no such rollout, InputError where it has not finished or where nothing would be sampled.
    """
    found = await store.rollouts(RolloutQuery(ids=[rollout_id]))
    if not found:
        raise NotFoundError(f"fork: no rollout {rollout_id}")
    rollout = found[0]
    if rollout.state not in FINAL_STATES:
        raise InputError(f"fork: expected a finished rollout, {rollout_id} is {rollout.state}")
    recorded = len(replayable(await store.calls([rollout_id], rollout.attempt)))
    if not 0 <= calls < recorded:
        raise InputError(
            f"fork: expected 0 to {recorded - 1} calls to replay, got {calls}: attempt {rollout.attempt} of rollout "
            f"{rollout_id} has {recorded} that a policy answered, and one at least is to be sampled"
            if recorded
            else f"fork: a policy answered no call of attempt {rollout.attempt} of rollout {rollout_id}"
        )
    root_id = rollout_id if rollout.fork is None else rollout.fork.root_id
    fork = Fork(rollout_id=rollout_id, attempt=rollout.attempt, calls=calls, root_id=root_id)
    return [
        NewRollout(
            run_id=rollout.run_id,
            task=rollout.task,
            group_id=f"fork:{rollout_id}:{calls}",
            replica=replica,
            mode=rollout.mode,
            step=rollout.step,
            sampling=rollout.sampling,
            retry=rollout.retry,
            prompts=rollout.prompts,
            fork=fork,
        )
        for replica in range(count)
    ]


def replayable(calls: Iterable[Call]) -> list[Choices]:
    """The calls of an attempt that a fork can replay, in the order in which they began: those of policies that arrived."""
    by_request: dict[str, Choices] = {}
    for call in sorted(calls, key=lambda one: one.id):
        if call.policy and call.delivered and call.finish_reason != ABANDONED:
            by_request.setdefault(call.id.partition(".")[0], []).append(call)
    return [choices for first, choices in by_request.items() if choices[0].id == first]
