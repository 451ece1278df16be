"""Groups of rollouts: which are queued and run ahead of the trainer, and which of them a training step takes.

The training loop drives it. Groups are numbered in the order of the tasks and named after their number, so what a killed
trainer had queued is found again by name; which of them were consumed stands in the store. Here is no other memory: a new
process reads it back. It knows neither calls nor weights. With rollouts = "tree" a group is enqueued in parts: its roots
first, then what tree_rollouts.py forks from those that have finished.

At the start of step s, groups are queued until those of max_staleness + 1 steps are outstanding. Taken in the order in which
they were queued, all of these are consumed by step s + max_staleness: nothing can become staler than the bound. With the
bound 0 a step queues its own groups and waits for them all: synchronous training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from agentlightning.config.run import TrainerConfig
from agentlightning.records import FINAL_STATES, JSON, NewRollout, Outcome, RetryPolicy, Rollout, Sampling
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.collect import ENQUEUE_BATCH, WAIT_S, RolloutCollector, nothing_to_learn
from agentlightning.trainer.data.tasks import TaskOrder
from agentlightning.trainer.rl.staleness import Staleness
from agentlightning.trainer.rl.tree_rollouts import TreeSampler

GROUP = "train"
"""First part of the ids of groups."""
OnProgress = Callable[[int, int], None]
MIN_WAIT_S = 0.01


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """Rollouts that a training step consumes."""

    rollouts: list[Rollout] = field(default_factory=list)
    """To learn from, group by group, in an order that the seed and the groups' numbers decide."""
    groups: set[str] = field(default_factory=set)
    """Ids of their groups, without those that failed throughout in an earlier process."""
    discarded: dict[str, Outcome] = field(default_factory=dict)
    """Cancelled rollouts, and those that no step will need, by id: stale or overprovisioned."""

    def extend(self, other: StepBatch) -> None:
        self.rollouts += other.rollouts
        self.groups |= other.groups
        self.discarded |= other.discarded


@dataclass(slots=True, eq=False)
class _Group:
    number: int
    rollouts: list[Rollout]
    """By replica, in the state last reported by the store."""
    size: int = 0
    """Rollouts that it has once its trees are whole; 0: those that it has."""
    cut_at: float | None = None
    """Deadline of its running rollouts; set when the first of the group has finished."""

    @property
    def running(self) -> list[str]:
        return [rollout.id for rollout in self.rollouts if rollout.state not in FINAL_STATES]

    @property
    def over(self) -> bool:
        return not self.left

    @property
    def left(self) -> int:
        """Rollouts that have not finished, or are not enqueued yet."""
        return max(0, self.size - len(self.rollouts)) + len(self.running)

    @property
    def cut(self) -> bool:
        return any(rollout.state == "cancelled" for rollout in self.rollouts)

    @property
    def cancelled(self) -> bool:
        return all(rollout.state == "cancelled" for rollout in self.rollouts)


@dataclass(slots=True, kw_only=True)
class GroupScheduler:
    """The groups of one run that no step has consumed yet."""

    store: LightningStore
    collector: RolloutCollector
    run_id: str
    tasks: Sequence[JSON]
    group_size: int
    trainer: TrainerConfig
    sampling: Sampling
    retry: RetryPolicy
    trees: TreeSampler | None = None
    """Samples groups as trees. None: their rollouts are independent."""
    clock: Callable[[], float] = time.monotonic
    _outstanding: dict[int, _Group] = field(default_factory=dict)
    _next: int = 0
    _read: bool = False
    _order: TaskOrder = field(init=False)

    def __post_init__(self) -> None:
        self._order = TaskOrder(len(self.tasks), 1, self.trainer.seed)

    async def take(self, step: int, staleness: Staleness | None, on_progress: OnProgress) -> StepBatch:
        """The groups of a training step, complete. `staleness` is given where the bound is above 0.

        Queues as many as may run ahead before it waits. At the start of a process it first takes the rollouts that ended
        the process before, because nothing could be learned from them.
        """
        batch = StepBatch()
        if not self._read:
            await self._find()
            self._drop_cancelled(batch, staleness)
            batch.rollouts += self._spent()
        # Before queueing: a cancelled rollout's place is filled at once, so the agents never idle for it.
        if staleness is not None and self.trainer.batch_order == "first_finished":
            await self._cancel_stale(staleness)
        # The bound: groups of this step and of max_staleness later ones, but none beyond the last step.
        steps = min(self.trainer.max_staleness + 1, self.trainer.steps - step + 1)
        await self._queue(self._with_surplus(steps * self.trainer.tasks_per_step))
        await self._add(batch, self.trainer.tasks_per_step, staleness, on_progress)
        return batch

    async def more(self, count: int, staleness: Staleness | None, on_progress: OnProgress) -> StepBatch:
        """`count` further groups, in place of those without a signal."""
        batch = StepBatch()
        await self._queue(self._with_surplus(count))
        await self._add(batch, count, staleness, on_progress)
        return batch

    async def leave(self, batch: StepBatch, step: int) -> None:
        """Cancels what is left and no later step will need, as overprovisioned rollouts of this step."""
        last = step == self.trainer.steps
        if self._outstanding and (last or self.trainer.max_staleness == 0):
            rest = [rollout for group in self._outstanding.values() for rollout in group.rollouts]
            # Cancelled before the step's list is written: a kill in between leaves cancelled rollouts that are still
            # unconsumed, and the next process finds and discards those; and a step consumes only rollouts that ended.
            await self._cancel([one for group in self._outstanding.values() for one in group.running])
            self.collector.forget(rollout.id for rollout in rest)
            self._outstanding.clear()
            batch.discarded |= {rollout.id: "overprovisioned" for rollout in rest}

    def forget(self) -> None:
        """Read everything from the store again: the steps go back to a checkpoint."""
        self.collector.forget(one.id for group in self._outstanding.values() for one in group.rollouts)
        self._outstanding.clear()
        self._read = False

    # --- outstanding groups ----------------------------------------------------------------------------------------

    async def _find(self) -> None:
        """Reads what an earlier process queued, and the number at which it stopped."""
        # Before the rollouts are read: one that finishes in between is reported by the next wait, at worst twice; begun
        # after the reading, it would be missed and waited for without end.
        await self.collector.begin()
        of_run = RolloutQuery(run_id=self.run_id, mode="train", unconsumed=True)
        self._hold([each for each in await self.store.rollouts(of_run) if _is_ours(each)])
        # The newest group may be consumed already, and then is not among the outstanding ones; numbers only grow, so one
        # group's worth of the newest rollouts holds the highest number.
        most = self.group_size
        if self.trees is not None:  # the newest rollouts may be forks of any group that was sampled at the same time
            most *= self.trainer.tasks_per_step
        newest = RolloutQuery(run_id=self.run_id, mode="train", newest_first=True, limit=most)
        known = [self._number(rollout) for rollout in await self.store.rollouts(newest) if _is_ours(rollout)]
        self._next = 1 + max([*known, *self._outstanding], default=-1)
        self._read = True

    def _spent(self) -> list[Rollout]:
        """Finished groups that nothing can be learned from, where the whole next step consists of them.

        They ended the process before; a resumed run samples others in their place.
        """
        ready = self._ready(self.trainer.tasks_per_step) or []
        if not ready or not nothing_to_learn([rollout for group in ready for rollout in group.rollouts]):
            return []
        spent = [group for group in self._outstanding.values() if group.over and nothing_to_learn(group.rollouts)]
        for group in spent:
            del self._outstanding[group.number]
        return [rollout for group in spent for rollout in group.rollouts]

    async def _queue(self, wanted: int) -> None:
        """Queues groups until `wanted` are outstanding. A group is enqueued in one transaction: never a part of it."""
        at_a_time = max(1, ENQUEUE_BATCH // self.group_size)
        begin = self.group_size if self.trees is None else self.trees.tree.roots
        while (missing := wanted - len(self._outstanding)) > 0:
            first, self._next = self._next, self._next + min(missing, at_a_time)
            new = [one for number in range(first, self._next) for one in self._group(number)[:begin]]
            # Enqueueing is idempotent: a rollout with an outcome was consumed before, and its number was hidden from
            # `_find` by a clock that went back. The next number is taken instead.
            self._hold([rollout for rollout in await self.store.enqueue(new) if rollout.outcome is None])

    def _group(self, number: int) -> list[NewRollout]:
        step, place = divmod(number, self.trainer.tasks_per_step)
        (position,) = self._order.step(number + 1)
        return [
            NewRollout(
                run_id=self.run_id,
                task=self.tasks[position],
                group_id=f"{GROUP}:{step + 1}:{place}",
                replica=replica,
                step=step + 1,
                sampling=self.sampling,
                retry=self.retry,
            )
            for replica in range(self.group_size)
        ]

    async def _fork(self) -> None:
        """Queues the next forks of trees whose rollouts have all finished, those of a group in one transaction."""
        if self.trees is None:
            return
        for group in [each for each in self._outstanding.values() if each.left]:
            if new := await self.trees.next_round(group.rollouts, self._group(group.number)):
                self._hold(await self.store.enqueue(new))

    def _number(self, rollout: Rollout) -> int:
        _, step, place, *_ = rollout.group_id.split(":")
        return (int(step) - 1) * self.trainer.tasks_per_step + int(place)

    def _hold(self, rollouts: Iterable[Rollout]) -> None:
        size = 0 if self.trees is None else self.group_size
        for rollout in rollouts:
            number = self._number(rollout)
            group = self._outstanding.setdefault(number, _Group(number, [], size))
            group.rollouts.append(rollout)
            group.rollouts.sort(key=lambda each: each.replica)
        # By number, that is in the order of queueing: fifo takes from the front, and that order keeps the staleness bound.
        self._outstanding = dict(sorted(self._outstanding.items()))
        self.collector.watch(one for group in self._outstanding.values() for one in group.running)

    # --- groups of a step -------------------------------------------------------------------------------------------

    async def _add(self, batch: StepBatch, count: int, staleness: Staleness | None, on_progress: OnProgress) -> None:
        for group in await self._complete(batch, count, staleness, on_progress):
            del self._outstanding[group.number]
            batch.groups.add(group.rollouts[0].group_id)
            cancelled = [rollout for rollout in group.rollouts if rollout.state == "cancelled"]
            batch.rollouts += [rollout for rollout in group.rollouts if rollout.state != "cancelled"]
            batch.discarded |= {one.id: _why_cancelled(one, staleness) for one in cancelled}

    def _drop_cancelled(self, batch: StepBatch, staleness: Staleness | None) -> None:
        """Groups of which nothing is left."""
        for group in [each for each in self._outstanding.values() if each.cancelled]:
            del self._outstanding[group.number]
            batch.discarded |= {one.id: _why_cancelled(one, staleness) for one in group.rollouts}

    async def _complete(
        self, batch: StepBatch, count: int, staleness: Staleness | None, on_progress: OnProgress
    ) -> list[_Group]:
        """Waits for the groups that a step takes."""
        while True:
            # State first, then the decision, then the wait: what finishes in between is kept by the collector, which waits
            # from its place in the order of finishing, so the wait returns at once.
            self._note_finished()
            self._drop_cancelled(batch, staleness)
            await self._queue(count)
            await self._fork()
            ready = self._ready(count)
            if ready is not None:
                return ready
            await self._cut()
            wanted = list(self._outstanding.values())[: count if self._in_order else None]
            # Of unordered groups the `count` that have least left: the estimate never exceeds what the step waits for.
            left = sum(sorted(group.left for group in wanted)[:count])
            on_progress(count * self.group_size - left, count * self.group_size)
            running = sum(sorted(len(group.running) for group in wanted)[:count])
            await self.collector.wait_finished(running, self._until_cut())

    def _ready(self, count: int) -> list[_Group] | None:
        """The groups that a step takes, in the order of their numbers; None where it must wait."""
        groups = list(self._outstanding.values())
        if not self._in_order:
            # Whole groups first: a trainer that was killed may have cancelled parts of those that it did not need.
            groups = sorted((group for group in groups if group.over), key=lambda group: group.cut)
        # By number again: the order within a step depends on the tasks alone, not on which rollout was the fastest.
        chosen = sorted(groups[:count], key=lambda group: group.number)
        return chosen if len(chosen) == count and all(group.over for group in chosen) else None

    @property
    def _in_order(self) -> bool:
        return self.trainer.batch_order == "fifo" and not self.trainer.overprovision

    def _with_surplus(self, count: int) -> int:
        return math.ceil(count * (1 + self.trainer.overprovision))

    def _note_finished(self) -> None:
        for group in self._outstanding.values():
            finished = self.collector.fetch(group.running)
            group.rollouts = [finished.get(rollout.id, rollout) for rollout in group.rollouts]
            # From the first end, not from queueing: how long a group waits for a worker says nothing of its stragglers.
            begun = 0 < len(group.running) < len(group.rollouts)
            if begun and self.trainer.group_deadline_s is not None and group.cut_at is None:
                group.cut_at = self.clock() + self.trainer.group_deadline_s

    # --- cancelling -------------------------------------------------------------------------------------

    def _until_cut(self) -> float:
        ends = [group.cut_at for group in self._outstanding.values() if group.cut_at is not None and group.running]
        return min(WAIT_S, max(MIN_WAIT_S, min(ends) - self.clock())) if ends else WAIT_S

    async def _cut(self) -> None:
        """Cancels running rollouts of groups past their deadline; their end is reported like any other."""
        now = self.clock()
        late = [group for group in self._outstanding.values() if group.cut_at is not None and group.cut_at <= now]
        await self._cancel([one for group in late for one in group.running])

    async def _cancel_stale(self, staleness: Staleness) -> None:
        """Cancels rollouts that began under weights too old for this step: nothing can be learned from them any more."""
        running = [one for group in self._outstanding.values() for one in group.running]
        found = await self.store.rollouts(RolloutQuery(ids=running)) if running else []
        # Only running ones, as the store has them now: one that waits for another attempt will sample from new weights.
        late = [rollout for rollout in found if rollout.state == "running" and _too_old(rollout, staleness)]
        await self._cancel([rollout.id for rollout in late])

    async def _cancel(self, rollout_ids: Sequence[str]) -> None:
        if rollout_ids:
            await self.store.cancel(rollout_ids)


def _is_ours(rollout: Rollout) -> bool:
    return rollout.group_id.startswith(f"{GROUP}:")


def _too_old(rollout: Rollout, staleness: Staleness | None) -> bool:
    return staleness is not None and rollout.started_ns is not None and staleness.began_too_early(rollout.started_ns)


def _why_cancelled(rollout: Rollout, staleness: Staleness | None) -> Outcome:
    return "stale" if _too_old(rollout, staleness) else "overprovisioned"
