"""Groups: which groups of rollouts are queued and run ahead of the trainer, and which of them a training step takes.

The training loop drives it. Groups are numbered in the order of the tasks and named after their number, so what a killed
trainer had queued is found again by name; which of them were consumed stands in the store. Here is no other memory: a new
process reads it back. It knows neither calls nor weights.

At the start of step s, groups are queued until those of max_staleness + 1 steps are outstanding. Taken in the order in which
they were queued, all of these are consumed by step s + max_staleness: nothing can become staler than the bound. With the
bound 0 a step queues its own groups and waits for them all: synchronous training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from agentlightning.config import TrainerConfig
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.collect import ENQUEUE_BATCH, WAIT_S, Collector, useless
from agentlightning.trainer.staleness import Staleness
from agentlightning.trainer.tasks import TaskOrder
from agentlightning.types import FINAL_STATES, JSON, NewRollout, Outcome, RetryPolicy, Rollout, Sampling

OnProgress = Callable[[int, int], None]
SHORTEST_WAIT_S = 0.01


@dataclass(slots=True, kw_only=True)
class Lot:
    """What a training step consumes."""

    rollouts: list[Rollout] = field(default_factory=list)
    """To learn from, group by group, in an order that the seed and the groups' numbers decide."""
    groups: int = 0
    """How many groups those are, without such as came to nothing before."""
    discarded: dict[str, Outcome] = field(default_factory=dict)
    """Cancelled rollouts, and those that no step will need, by id: stale or surplus."""


@dataclass(slots=True, eq=False)
class _Group:
    number: int
    rollouts: list[Rollout]
    """By replica, as they were last heard of."""
    cut_at: float | None = None
    """When what still runs of it is cancelled; set when the first of it has finished."""

    @property
    def running(self) -> list[str]:
        return [rollout.id for rollout in self.rollouts if rollout.state not in FINAL_STATES]

    @property
    def over(self) -> bool:
        return all(rollout.state in FINAL_STATES for rollout in self.rollouts)

    @property
    def cut(self) -> bool:
        return any(rollout.state == "cancelled" for rollout in self.rollouts)

    @property
    def cancelled(self) -> bool:
        return all(rollout.state == "cancelled" for rollout in self.rollouts)


@dataclass(slots=True, kw_only=True)
class Groups:
    """The groups of one run that no step has consumed yet."""

    store: LightningStore
    collector: Collector
    run_id: str
    tasks: Sequence[JSON]
    group_size: int
    trainer: TrainerConfig
    sampling: Sampling
    retry: RetryPolicy
    clock: Callable[[], float] = time.monotonic
    _outstanding: dict[int, _Group] = field(default_factory=dict)
    _next: int = 0
    _read: bool = False
    _order: TaskOrder = field(init=False)

    def __post_init__(self) -> None:
        self._order = TaskOrder(len(self.tasks), 1, self.trainer.seed)

    async def take(self, step: int, staleness: Staleness | None, on_progress: OnProgress) -> Lot:
        """The groups of a training step, complete. `staleness` is given where the bound is above 0.

        Queues as many as may run ahead before it waits. At the start of a process, rollouts come first of which nothing
        could be learned: those ended the process before.
        """
        lot = Lot()
        if not self._read:
            await self._find()
            self._drop_cancelled(lot, staleness)
            lot.rollouts += self._spent()
        if staleness is not None and self.trainer.group_order == "finished":
            await self._cancel_stale(staleness)
        steps = min(self.trainer.max_staleness + 1, self.trainer.steps - step + 1)
        await self._queue(self._with_surplus(steps * self.trainer.tasks_per_step))
        await self._add(lot, self.trainer.tasks_per_step, staleness, on_progress)
        return lot

    async def more(self, lot: Lot, count: int, staleness: Staleness | None, on_progress: OnProgress) -> None:
        """Add `count` groups to what a step has, in place of such as teach nothing."""
        await self._queue(self._with_surplus(count))
        await self._add(lot, count, staleness, on_progress)

    async def leave(self, lot: Lot, step: int) -> None:
        """The step has what it needs: what is left, and no later step will need, is cancelled and is the step's surplus."""
        last = step == self.trainer.steps
        if self._outstanding and (last or self.trainer.max_staleness == 0):
            rest = [rollout for group in self._outstanding.values() for rollout in group.rollouts]
            await self._cancel([one for group in self._outstanding.values() for one in group.running])
            self.collector.forget(rollout.id for rollout in rest)
            self._outstanding.clear()
            lot.discarded |= {rollout.id: "surplus" for rollout in rest}

    def forget(self) -> None:
        """Read everything from the store again: the steps go back to a checkpoint."""
        self.collector.forget(one.id for group in self._outstanding.values() for one in group.rollouts)
        self._outstanding.clear()
        self._read = False

    # --- what is outstanding ----------------------------------------------------------------------------------------

    async def _find(self) -> None:
        """What an earlier process queued, and where it stopped counting."""
        await self.collector.begin()
        of_run = RolloutQuery(run_id=self.run_id, mode="train", unconsumed=True)
        self._hold(await self.store.rollouts(of_run))
        newest = RolloutQuery(run_id=self.run_id, mode="train", newest_first=True, limit=self.group_size)
        known = [self._number(rollout) for rollout in await self.store.rollouts(newest)]
        self._next = 1 + max([*known, *self._outstanding], default=-1)
        self._read = True

    def _spent(self) -> list[Rollout]:
        """What nothing can come of, where the whole next step is over already and such.

        It ended the process before; whoever resumes wants others in its place.
        """
        ready = self._ready(self.trainer.tasks_per_step) or []
        if not ready or not useless([rollout for group in ready for rollout in group.rollouts]):
            return []
        spent = [group for group in self._outstanding.values() if group.over and useless(group.rollouts)]
        for group in spent:
            del self._outstanding[group.number]
        return [rollout for group in spent for rollout in group.rollouts]

    async def _queue(self, wanted: int) -> None:
        """Queue groups until `wanted` are outstanding, each in one transaction with others: no group is ever half there."""
        at_a_time = max(1, ENQUEUE_BATCH // self.group_size)
        while (missing := wanted - len(self._outstanding)) > 0:
            first, self._next = self._next, self._next + min(missing, at_a_time)
            new = [one for number in range(first, self._next) for one in self._group(number)]
            # An outcome: a clock that went back hid its number from `_find`. The next one is taken instead.
            self._hold([rollout for rollout in await self.store.enqueue(new) if rollout.outcome is None])

    def _group(self, number: int) -> list[NewRollout]:
        step, place = divmod(number, self.trainer.tasks_per_step)
        (position,) = self._order.step(number + 1)
        return [
            NewRollout(
                run_id=self.run_id,
                task=self.tasks[position],
                group_id=f"train:{step + 1}:{place}",
                replica=replica,
                step=step + 1,
                sampling=self.sampling,
                retry=self.retry,
            )
            for replica in range(self.group_size)
        ]

    def _number(self, rollout: Rollout) -> int:
        _, step, place, *_ = rollout.group_id.split(":")
        return (int(step) - 1) * self.trainer.tasks_per_step + int(place)

    def _hold(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in sorted(rollouts, key=lambda each: (each.group_id, each.replica)):
            number = self._number(rollout)
            self._outstanding.setdefault(number, _Group(number, [])).rollouts.append(rollout)
        self._outstanding = dict(sorted(self._outstanding.items()))
        self.collector.watch(one for group in self._outstanding.values() for one in group.running)

    # --- what a step gets -------------------------------------------------------------------------------------------

    async def _add(self, lot: Lot, count: int, staleness: Staleness | None, on_progress: OnProgress) -> None:
        for group in await self._complete(lot, count, staleness, on_progress):
            del self._outstanding[group.number]
            lot.groups += 1
            cancelled = [rollout for rollout in group.rollouts if rollout.state == "cancelled"]
            lot.rollouts += [rollout for rollout in group.rollouts if rollout.state != "cancelled"]
            lot.discarded |= {one.id: _why_cancelled(one, staleness) for one in cancelled}

    def _drop_cancelled(self, lot: Lot, staleness: Staleness | None) -> None:
        """Groups of which nothing is left."""
        for group in [each for each in self._outstanding.values() if each.cancelled]:
            del self._outstanding[group.number]
            lot.discarded |= {one.id: _why_cancelled(one, staleness) for one in group.rollouts}

    async def _complete(
        self, lot: Lot, count: int, staleness: Staleness | None, on_progress: OnProgress
    ) -> list[_Group]:
        """Wait for the groups that a step takes."""
        while True:
            self._note_finished()
            self._drop_cancelled(lot, staleness)
            await self._queue(count)
            ready = self._ready(count)
            if ready is not None:
                return ready
            await self._cut()
            wanted = list(self._outstanding.values())[: count if self._in_order else None]
            left = sum(sorted(len(group.running) for group in wanted)[:count])
            on_progress(count * self.group_size - left, count * self.group_size)
            await self.collector.hear(left, self._until_cut())

    def _ready(self, count: int) -> list[_Group] | None:
        """The groups that a step takes, in the order of their numbers; None where it must wait."""
        groups = list(self._outstanding.values())
        if not self._in_order:  # whole ones first: a trainer that was killed may have cancelled what it did not need
            groups = sorted((group for group in groups if group.over), key=lambda group: group.cut)
        chosen = sorted(groups[:count], key=lambda group: group.number)
        return chosen if len(chosen) == count and all(group.over for group in chosen) else None

    @property
    def _in_order(self) -> bool:
        return self.trainer.group_order == "queued" and not self.trainer.surplus

    def _with_surplus(self, count: int) -> int:
        return math.ceil(count * (1 + self.trainer.surplus))

    def _note_finished(self) -> None:
        for group in self._outstanding.values():
            heard = self.collector.fetch(group.running)
            group.rollouts = [heard.get(rollout.id, rollout) for rollout in group.rollouts]
            begun = 0 < len(group.running) < len(group.rollouts)
            if begun and self.trainer.group_deadline_s is not None and group.cut_at is None:
                group.cut_at = self.clock() + self.trainer.group_deadline_s

    # --- what is not waited for -------------------------------------------------------------------------------------

    def _until_cut(self) -> float:
        ends = [group.cut_at for group in self._outstanding.values() if group.cut_at is not None and group.running]
        return min(WAIT_S, max(SHORTEST_WAIT_S, min(ends) - self.clock())) if ends else WAIT_S

    async def _cut(self) -> None:
        """Cancel what runs of groups whose deadline has passed; that it is over is heard like any other end."""
        now = self.clock()
        late = [group for group in self._outstanding.values() if group.cut_at is not None and group.cut_at <= now]
        await self._cancel([one for group in late for one in group.running])

    async def _cancel_stale(self, staleness: Staleness) -> None:
        """Cancel what began under weights that this step is too far from: nothing can be learned from it any more."""
        running = [one for group in self._outstanding.values() for one in group.running]
        found = await self.store.rollouts(RolloutQuery(ids=running)) if running else []
        # One that waits for another attempt will sample afresh.
        late = [rollout for rollout in found if rollout.state == "running" and _too_old(rollout, staleness)]
        await self._cancel([rollout.id for rollout in late])

    async def _cancel(self, rollout_ids: Sequence[str]) -> None:
        if rollout_ids:
            await self.store.cancel(rollout_ids)


def _too_old(rollout: Rollout, staleness: Staleness | None) -> bool:
    return staleness is not None and rollout.started_ns is not None and staleness.began_too_early(rollout.started_ns)


def _why_cancelled(rollout: Rollout, staleness: Staleness | None) -> Outcome:
    return "stale" if _too_old(rollout, staleness) else "surplus"
