"""Forks: rollouts that continue a recorded one after some of its calls.

A fork's agent starts from the beginning. The gateway answers its first calls from the record, where they are the recorded
ones, and samples from then on (gateway/attempts.py): so any agent comes back into a state in which it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from uuid_utils import uuid7

from agentlightning.errors import InputError, NotFoundError
from agentlightning.records import ABANDONED, FINAL_STATES, Call, Fork, NewRollout, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery

REPLAYED_PROTOCOLS = ("chat", "completions", "messages")
"""In which the next request holds all that an external model needs: nothing is kept at the provider."""

Choices = list[Call]  # the samples of one request, the first of them first


async def new_forks(
    store: LightningStore,
    rollout_id: str,
    calls: int,
    count: int = 1,
    *,
    key: str | None = None,
) -> list[NewRollout]:
    """Make rollouts to enqueue, a group of `count`, that continue the latest attempt of a finished rollout after its first
    `calls` model calls: with its task, mode, sampling and versions of prompts.

    key: names the group, so that forks of a key are enqueued once.

    NotFoundError where there is no such rollout, InputError where it has not finished, where it is a session of a served
    model's user, or where nothing would be sampled.
    """
    found = await store.rollouts(RolloutQuery(ids=[rollout_id]))
    if not found:
        raise NotFoundError(f"fork: no rollout {rollout_id}")
    rollout = found[0]
    if rollout.kind == "session":
        raise InputError(
            f"fork: rollout {rollout_id} is a session of a served model's user: no agent can be started for it"
        )
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
    return forks_of(rollout, calls, count, key)


def is_apart(rollout: Rollout) -> bool:
    """True for a fork in a group of its own, which counts in no figure of the step or evaluation of what it continues."""
    return rollout.kind in ("fork", "credit")


def forks_of(rollout: Rollout, calls: int, count: int, key: str | None = None) -> list[NewRollout]:
    """The rollouts of `new_forks`, where it is known that they can be: `rollout` has finished, and has more calls to replay
    than `calls`."""
    fork = Fork(
        rollout_id=rollout.id,
        attempt=rollout.attempt,
        calls=calls,
        root_id=rollout.id if rollout.fork is None else rollout.fork.root_id,
    )
    group_id = f"fork:{rollout.id}:{calls}:{key or uuid7()}"
    kept = {name: getattr(rollout, name) for name in ("run_id", "task", "mode", "step", "sampling", "retry", "prompts")}
    return [NewRollout(group_id=group_id, replica=replica, fork=fork, kind="fork", **kept) for replica in range(count)]


def replayable(calls: Iterable[Call]) -> list[Choices]:
    """The calls of an attempt that a fork can replay, in the order in which they began: those of policies that arrived."""
    by_request: dict[str, Choices] = {}
    for call in sorted(calls, key=_began):
        if call.policy and call.delivered and call.finish_reason != ABANDONED:
            by_request.setdefault(_request(call.id), []).append(call)
    return [choices for first, choices in by_request.items() if choices[0].id == first]


def replayable_external(calls: Iterable[Call], place: Sequence[Choices]) -> list[Call]:
    """The calls of an attempt to external models that a fork can replay, in the order in which they began: those before its
    `place`, the call at which it continues otherwise (none: nothing is replayed), that arrived and whose protocol keeps
    nothing at the provider."""
    return [
        call
        for call in sorted(calls, key=lambda one: one.id)
        if place
        and call.id < place[0][0].id
        and not call.policy
        and call.protocol in REPLAYED_PROTOCOLS
        and call.delivered
        and call.finish_reason != ABANDONED
        and (call.completion.get("content") or call.completion.get("tool_calls"))
        and not call.completion.get("reasoning_content")
    ]


def calls_before(calls: Sequence[Call]) -> dict[str, int]:
    """By call, the number of calls to replay so that it comes next; without those that a fork cannot replay."""
    places = {choices[0].id: place for place, choices in enumerate(replayable(calls))}
    return {call.id: places[_request(call.id)] for call in calls if _request(call.id) in places}


def replay_ended(rollout: Rollout, calls: Iterable[Call]) -> int | None:
    """The number of calls after which the replay of a fork's latest attempt ended too early, so that it is an independent
    rollout from there on; None where it did not, or has not yet. calls: of the rollout."""
    if rollout.fork is None:
        return None
    own = [call for call in calls if call.attempt == rollout.attempt and call.policy]
    replayed = {_request(call.replayed_id) for call in own if call.replayed_id and call.finish_reason != ABANDONED}
    ended = rollout.attempt > 0 and rollout.state in FINAL_STATES
    over = ended or any(call.replayed_id is None for call in own)
    return len(replayed) if over and len(replayed) < rollout.fork.calls else None


def replay_warning(rollout: Rollout, calls: Iterable[Call]) -> str | None:
    """A sentence where the replay ended too early."""
    ended = replay_ended(rollout, calls)
    if rollout.fork is None or ended is None:
        return None
    return (
        f"the replay ended after {ended} of {rollout.fork.calls} calls: the agent did not go on as recorded, and "
        "this is a rollout of its own from there on"
    )


def _began(call: Call) -> tuple[str, int, str]:
    """Sorts calls by when they began, the tenth sample of one request after the ninth."""
    first, _, sample = call.id.partition(".")
    return first, len(sample), sample


def _request(call_id: str) -> str:
    """The id of the first of several samples of one request."""
    return call_id.partition(".")[0]
