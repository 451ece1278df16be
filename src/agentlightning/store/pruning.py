"""Pruning: which runs and records have become too old or too many, and their deletion.

Driven by `agl runs delete` and by a server that was told what to keep. Whole runs go, the one that was changed first before
the others, and never one that is running. Of runs that stay, records of rollouts go that were learned from so long ago that
no crash can ask for them again: a step that is covered by a checkpoint is not executed again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentlightning.errors import ConflictError, NotFoundError, StoreError
from agentlightning.records import FINAL_STATES, Run, RunSize, Step
from agentlightning.store.audit import Actor, acting_as
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import read_steps

log = logging.getLogger(__name__)

DAY_NS = 86_400 * 10**9
EVERY_S = 3600.0
"""Time between two looks of a server."""
REFUSALS = (ConflictError, NotFoundError)
"""Errors that a store raises about one run or step; whatever else it raises is of the store itself, and ends a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Bounds of what is kept. None: everything."""

    days: float | None = None
    """Runs that changed within so many days."""
    bytes: int | None = None
    """Runs until their sizes add up to this."""
    record_days: float | None = None
    """Calls and spans of consumed rollouts, for so many days after they finished."""


KEEP_ALL = Keep()


@dataclass(frozen=True, slots=True)
class Doomed:
    """A run that is to go, and why."""

    run: Run
    reason: str
    bytes: int | None = None


async def find_doomed(store: LightningStore, keep: Keep, now_ns: int) -> list[Doomed]:
    """Runs that are more than what is kept, in the order in which they go."""
    runs = sorted(await store.runs(), key=lambda run: (run.updated_ns, run.id))
    sizes = {} if keep.bytes is None else {size.run_id: size for size in await store.sizes()}
    return choose(runs, sizes, keep, now_ns)


def choose(runs: Sequence[Run], sizes: dict[str, RunSize], keep: Keep, now_ns: int) -> list[Doomed]:
    """Chooses as `find_doomed` does, from runs that are given, the longest unchanged first."""
    left = sum(size.bytes for size in sizes.values())
    doomed = []
    for run in runs:
        age_days = (now_ns - run.updated_ns) / DAY_NS
        size = sizes[run.id].bytes if run.id in sizes else None
        if run.state == "running":
            continue
        if keep.days is not None and age_days > keep.days:
            doomed.append(Doomed(run, f"unchanged for {age_days:.0f} days", size))
        elif keep.bytes is not None and left > keep.bytes:
            doomed.append(Doomed(run, "the store is too large", size))
        else:
            continue
        left -= size or 0
    return doomed


async def prune(store: LightningStore, keep: Keep, now_ns: int) -> tuple[list[Doomed], int]:
    """Delete what is more than what is kept; the runs that went, and how many calls of runs that stay."""
    gone = await delete_doomed(store, await find_doomed(store, keep, now_ns))
    return gone, await drop_old_records(store, keep, now_ns)


async def delete_doomed(store: LightningStore, doomed: Sequence[Doomed]) -> list[Doomed]:
    """Delete these runs; those that went. One that the store refuses to delete is logged, and keeps no other."""
    gone = []
    for one in doomed:
        try:
            await store.delete_runs([one.run.id])
        except REFUSALS as cause:
            log.warning("run %s was not deleted: %s", one.run.id, cause)
        else:
            gone.append(one)
    return gone


async def drop_old_records(
    store: LightningStore, keep: Keep, now_ns: int, *, without: Collection[str] = (), dry: bool = False
) -> int:
    """Delete calls and spans that are older than what is kept, but for runs `without`; how many calls.

    `dry`: delete nothing, and count what the rollouts say they have.
    """
    if keep.record_days is None:
        return 0
    before_ns = now_ns - int(keep.record_days * DAY_NS)
    dropped = 0
    for run in await store.runs():
        if run.id in without:
            continue
        checkpoints = await store.checkpoints(run.id)
        covered = max((checkpoint.step for checkpoint in checkpoints), default=0)
        async for steps in read_steps(store, run.id):
            for step in steps:
                if step.state == "closed" and step.step <= covered:
                    dropped += await _drop(store, step, before_ns, dry)
    return dropped


async def _drop(store: LightningStore, step: Step, before_ns: int, dry: bool) -> int:
    ids = [consumed.rollout_id for consumed in step.consumed]
    found = await store.rollouts(RolloutQuery(ids=ids)) if ids else []
    beside = RolloutQuery(run_id=step.run_id, mode="eval", step=step.step)
    forks = [one for one in await store.rollouts(beside) if one.kind == "credit"]
    found += [one for one in forks if one.state in FINAL_STATES]
    old = [rollout for rollout in found if rollout.finished_ns is not None and rollout.finished_ns < before_ns]
    if dry:
        return sum(rollout.calls for rollout in old)
    try:
        return await store.drop_records([rollout.id for rollout in old]) if old else 0
    except REFUSALS as cause:
        log.warning("records of step %d of run %s were not deleted: %s", step.step, step.run_id, cause)
        return 0


async def keep_pruned(store: LightningStore, keep: Keep) -> None:
    """Prune for ever, once an hour. What a store refuses is logged, and tried again."""
    while True:
        try:
            with acting_as(Actor(name="this server, by what it is to keep")):
                doomed, dropped = await prune(store, keep, time.time_ns())
        except StoreError as cause:
            log.warning("the store was not pruned: %s", cause)
        else:
            for one in doomed:
                log.info("run %s was deleted: %s", one.run.id, one.reason)
            if dropped:
                log.info("%d calls of rollouts that were learned from long ago were deleted", dropped)
        await asyncio.sleep(EVERY_S)
