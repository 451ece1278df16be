"""Scheduler: which groups of rollouts are queued and run ahead of the trainer, and which of them a training step takes.

The training loop drives it. Groups are named after their number in the order of the tasks, so what a killed trainer had
queued is found again by name; which of them were consumed stands in the store. With rollouts = "tree" a group is enqueued in
parts: its roots first, then forks of those that have finished.

At the start of step s, groups are queued until those of max_staleness + 1 steps are outstanding. Taken in the order in which
they were queued, all of these are consumed by step s + max_staleness: nothing can become staler than the bound. With the
bound 0 a step queues its own groups and waits for them all: synchronous training.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentlightning.algorithms.credit.tree import RolloutTree
from agentlightning.config.run import TrainerConfig
from agentlightning.engines.base import Metrics
from agentlightning.errors import NoCallsError
from agentlightning.records import (
    FINAL_STATES,
    JSON,
    Call,
    NewRollout,
    Outcome,
    Resource,
    RetryPolicy,
    Rollout,
    Sampling,
)
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.forks import forks_of, replay_ended, replayable
from agentlightning.store.gateway_events import NO_CALLS
from agentlightning.store.scan import by_attempt
from agentlightning.trainer.task_sampler import SampledTasks
from agentlightning.training_types import Trajectory

ENQUEUE_BATCH = 2048
PROGRESS_SHARES = 20
"""The waiter wakes when a twentieth of what is outstanding has finished: often enough to watch, seldom enough to be free."""
WAIT_S = 10.0


class RolloutCollector:
    """Waits for rollouts of one run; keeps its place in the order in which they finish."""

    def __init__(self, store: LightningStore, run_id: str) -> None:
        self._store = store
        self.run_id = run_id
        self.waited_s = 0.0
        """Time of all waits so far, whoever waited."""
        self._seen: int | None = None
        self._watched: set[str] = set()
        self._finished: dict[str, Rollout] = {}
        """Finished rollouts that were watched for and not fetched yet: never more than are outstanding."""

    async def collect(
        self, wanted: Sequence[NewRollout], on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Rollout]:
        """Enqueue `wanted` and return its rollouts, finished, in the order given.

        StoreError where nothing finishes because the store cannot be written any more.
        """
        await self.begin()
        rollouts: list[Rollout] = []
        for start in range(0, len(wanted), ENQUEUE_BATCH):
            rollouts += await self._store.enqueue(wanted[start : start + ENQUEUE_BATCH])
        return await self.finished(rollouts, on_progress)

    async def finished(
        self, rollouts: Sequence[Rollout], on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Rollout]:
        """Return these rollouts, read after `begin`, once all have finished, in the order given. StoreError as `collect`."""
        finished = {rollout.id: rollout for rollout in rollouts if rollout.state in FINAL_STATES}
        outstanding = {rollout.id for rollout in rollouts} - set(finished)
        self.watch(outstanding)
        while outstanding:
            on_progress(len(finished), len(rollouts))
            await self.wait_finished(len(outstanding))
            finished |= self.fetch(outstanding)
            outstanding -= set(finished)
        on_progress(len(finished), len(rollouts))
        return [finished[rollout.id] for rollout in rollouts]

    async def begin(self) -> int:
        """Reads the place in the order of finished rollouts, before what is to be watched is read or enqueued."""
        if self._seen is None:
            counts = await self._store.count(self.run_id)
            self._seen = sum(number for (_, state), number in counts.items() if state in FINAL_STATES)
        return self._seen

    def watch(self, rollout_ids: Iterable[str]) -> None:
        """Keeps these rollouts, once they have finished, until they are fetched."""
        self._watched.update(rollout_ids)

    def forget(self, rollout_ids: Iterable[str]) -> None:
        """Drops rollouts that nobody will fetch."""
        for rollout_id in rollout_ids:
            self._watched.discard(rollout_id)
            self._finished.pop(rollout_id, None)

    def fetch(self, rollout_ids: Iterable[str]) -> dict[str, Rollout]:
        """Those of these rollouts that have finished, by id; they are watched no longer."""
        return {one: self._finished.pop(one) for one in list(rollout_ids) if one in self._finished}

    async def wait_finished(self, outstanding: int, within_s: float = WAIT_S) -> None:
        """Waits until some rollouts have finished, the more the more are `outstanding`, or for `within_s` seconds."""
        assert self._seen is not None, "begin() comes first"
        started = time.perf_counter()
        finished = await self._store.wait(self.run_id, self._seen, 1 + outstanding // PROGRESS_SHARES, within_s)
        self.waited_s += time.perf_counter() - started
        if not finished and within_s >= WAIT_S:
            # A full disk can still be read: workers would try, and this would wait, for ever. A write finds out.
            await self._store.update_run(self.run_id)
        for rollout in finished:
            self._seen = max(self._seen, rollout.finished_seq or 0)
            if rollout.id in self._watched:
                self._watched.discard(rollout.id)
                self._finished[rollout.id] = rollout


def nothing_to_learn(rollouts: Sequence[Rollout]) -> bool:
    """True where nothing can be learned: all failed, or those that succeeded did so without a model call."""
    return all(rollout.state != "succeeded" or rollout.calls == 0 for rollout in rollouts)


def check_calls_recorded(rollouts: Sequence[Rollout]) -> str | None:
    """A sentence about rollouts that succeeded without one recorded call; None where every one has calls.

    Raises NoCallsError, with the likely cause, where no rollout at all has a recorded call: there is nothing to learn from.
    """
    succeeded = [rollout for rollout in rollouts if rollout.state == "succeeded"]
    silent = [rollout for rollout in succeeded if rollout.calls == 0]
    if not silent:
        return None
    cause = silent[0].warning or NO_CALLS
    if len(silent) == len(succeeded):
        raise NoCallsError(f"none of the {len(silent)} rollouts that finished has a model call: {cause}")
    return f"{len(silent)} of {len(succeeded)} rollouts finished without a model call: {cause}"


@dataclass(slots=True)
class PublishedVersions:
    """The training step that made each policy version, and the time since which it is served."""

    _by_version: dict[int, Resource] = field(default_factory=dict)

    def record(self, published: Iterable[Resource]) -> None:
        """Versions in the order in which they were published."""
        for resource in published:
            self._by_version.setdefault(resource.version, resource)

    def step_of(self, version: int) -> int:
        """The step that made a version; 0 for one that nobody published: the weights that a sampler starts with."""
        return self._by_version[version].step if version in self._by_version else 0

    def step_at(self, time_ns: int) -> int:
        """The step whose weights were served at a time; 0 before the first."""
        served = (one.step for one in reversed(self._by_version.values()) if one.created_ns <= time_ns)
        return next(served, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """The bound of one training step: it learns from weights of `step - 1` and of up to `bound` steps before."""

    versions: PublishedVersions
    step: int
    bound: float
    policies: Collection[str] | None = None
    """Those whose weights are exchanged: others, opponents of the run, count versions of their own. None: all."""

    def of(self, trajectory: Trajectory) -> int:
        """Steps between the weights of its oldest token and those that it updates; 0 where it has no token.

        In step 5, which updates the weights of step 4, a rollout that began under the weights of step 2 has staleness 2.
        """
        return max((self.step - 1 - self.versions.step_of(one) for one in self._versions(trajectory)), default=0)

    def began_too_early(self, time_ns: int) -> bool:
        """True where a rollout that samples since then can only be too stale."""
        return self.step - 1 - self.versions.step_at(time_ns) > self.bound

    def sort(
        self, groups: Sequence[Sequence[Trajectory]]
    ) -> tuple[list[list[Trajectory]], list[str], dict[str, float]]:
        """The groups without what is too stale, the ids of that, and the metrics staleness_mean, staleness_max,
        mixed_versions (share of rollouts with tokens of several versions) and stale (rollouts left out)."""
        ages = {one.rollout_id: self.of(one) for group in groups for one in group}
        stale = [rollout_id for rollout_id, age in ages.items() if age > self.bound]
        fresh = [[one for one in group if ages[one.rollout_id] <= self.bound] for group in groups]
        kept = [age for age in ages.values() if age <= self.bound]
        mixed = [len(self._versions(one)) > 1 for group in fresh for one in group]
        return (
            [group for group in fresh if group],
            stale,
            {
                "staleness_mean": statistics.fmean(kept) if kept else 0.0,
                "staleness_max": float(max(kept, default=0)),
                "mixed_versions": statistics.fmean(mixed) if mixed else 0.0,
                "stale": float(len(stale)),
            },
        )

    def _versions(self, trajectory: Trajectory) -> set[int]:
        return {
            span.version
            for transition in trajectory.transitions
            if self.policies is None or transition.policy in self.policies
            for span in transition.versions
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSampler:
    """Forks the trees of one run's groups."""

    store: LightningStore
    tree: RolloutTree
    group_size: int
    seed: int

    async def next_round(self, group: Sequence[Rollout], independent: Sequence[NewRollout]) -> list[NewRollout]:
        """The rollouts that the trees of a group get next, none where they still run or are complete.

        group: what was enqueued of it. independent: the whole group as it would be without trees, by replica. A tree is
        forked after calls that were sampled for one of its rollouts that succeeded and that others followed, chosen at
        random, each once before any a second time (Tree-GRPO, arXiv 2509.21240, section 3.1, has nodes chosen at random).
        Where it has none, as of an agent that makes one call, its place is taken by an independent rollout.
        """
        known = {one.replica: one for one in group}
        growing: dict[int, list[int]] = {}
        """By tree, the replicas of its next round."""
        for tree in range(self.tree.roots):
            replicas = self.tree.replicas(tree, self.group_size)
            wanted = [replica for replica in replicas if replica not in known]
            if wanted and all(known[one].state in FINAL_STATES for one in replicas if one in known):
                growing[tree] = wanted[: self.tree.branches(self.group_size)]
        ids = [known[each].id for tree in growing for each in self._sampled(tree, known)]
        calls = by_attempt(await self.store.calls(ids)) if ids else {}
        return [
            new
            for tree, wanted in growing.items()
            for new in self._forks([known[each] for each in self._sampled(tree, known)], wanted, calls, independent)
        ]

    def _sampled(self, tree: int, known: Mapping[int, Rollout]) -> list[int]:
        return [replica for replica in self.tree.replicas(tree, self.group_size) if replica in known]

    def _forks(
        self,
        tree: Sequence[Rollout],
        wanted: Sequence[int],
        calls: Mapping[tuple[str, int], Sequence[Call]],
        independent: Sequence[NewRollout],
    ) -> list[NewRollout]:
        """One for each of the `wanted` replicas."""
        nodes = [
            (rollout, place)
            for rollout in tree
            if rollout.state == "succeeded"
            for place in _nodes(calls.get((rollout.id, rollout.attempt), ()))
        ]
        # By names alone: a run with the same seed forks alike, and so does a step that was killed before it forked.
        random.Random(f"{self.seed}:{independent[0].group_id}:{wanted[0]}").shuffle(nodes)
        found = []
        for number, replica in enumerate(wanted):
            new = independent[replica]
            if nodes:
                rollout, place = nodes[number % len(nodes)]
                [fork] = forks_of(rollout, place, 1)
                new = replace(new, fork=fork.fork, prompts=fork.prompts)
            found.append(new)
        return found


def _nodes(calls: Sequence[Call]) -> list[int]:
    """The numbers of calls to replay, so that the last of them is a call that was sampled for the rollout itself, and is
    not its last one."""
    choices = replayable(calls)
    return [place for place, one in enumerate(choices[:-1], 1) if one[0].replayed_id is None]


class TreeTally:
    """Counts over the rollouts of one step, of what they share."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def add(self, rollouts: Sequence[Rollout], calls: Sequence[Call]) -> None:
        """Rollouts that have finished, with the calls of their last attempts."""
        own = by_attempt(calls)
        for rollout in rollouts:
            recorded = own[rollout.id, rollout.attempt]
            shared = [call for call in recorded if call.shared]
            self._counts.update(
                forks=rollout.fork is not None,
                ended=replay_ended(rollout, recorded) is not None,
                replayed=len(shared),
                tokens=sum(len(call.sampled_ids) for call in shared),
                sampled=sum(call.learnable for call in recorded if call.policy),
            )

    def metrics(self) -> Metrics:
        """By the names of metrics.py."""
        found = self._counts
        return {
            "tree/forks": float(found["forks"]),
            "tree/replay_ended_share": found["ended"] / max(1, found["forks"]),
            "tree/shared_share": found["replayed"] / max(1, found["replayed"] + found["sampled"]),
            "tree/replayed_tokens": float(found["tokens"]),
        }


GROUP = "train"
"""First part of the ids of groups."""
OnProgress = Callable[[int, int], None]


class TaskOrder:
    """The tasks of each training step: every epoch is a new permutation, and a step's tasks depend on the seed alone.

    >>> order = TaskOrder(count=3, per_step=2, seed=0)
    >>> [order.step(step) for step in (1, 2)]  # rows by position; the third epoch position wraps into the next epoch
    [[...], [...]]
    """

    def __init__(self, count: int, per_step: int, seed: int) -> None:
        self._count = count
        self._per_step = per_step
        self._seed = seed
        self._epoch = (-1, list[int]())

    def step(self, step: int) -> list[int]:
        """Positions of the tasks of `step` (from 1), as many as tasks_per_step."""
        start = (step - 1) * self._per_step
        return [self._position(place) for place in range(start, start + self._per_step)]

    def _position(self, place: int) -> int:
        epoch, offset = divmod(place, self._count)
        if epoch != self._epoch[0]:
            permutation = list(range(self._count))
            random.Random(f"{self._seed}:{epoch}").shuffle(permutation)
            self._epoch = (epoch, permutation)
        return self._epoch[1][offset]


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

    @property
    def running(self) -> list[str]:
        return [rollout.id for rollout in self.rollouts if rollout.state not in FINAL_STATES]

    @property
    def left(self) -> int:
        """Rollouts that have not finished, or are not enqueued yet."""
        return max(0, self.size - len(self.rollouts)) + len(self.running)

    @property
    def cancelled(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.state == "cancelled"]


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
    sampled: SampledTasks | None = None
    """Draws the tasks of a step by what is known of them. None: each once an epoch."""
    _outstanding: dict[int, _Group] = field(default_factory=dict)
    _step: int = 1
    """The step that is under way."""
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
        batch, self._step = StepBatch(), step
        if not self._read:
            await self._find()
            self._drop_cancelled(batch, staleness)
            batch.rollouts += self._spent()
        # Before queueing: a cancelled rollout's place is filled at once, so the agents never idle for it.
        if staleness is not None and self.trainer.batch_order == "first_finished":
            await self._cancel_stale(staleness)
        # The bound: groups of this step and of max_staleness later ones, but none beyond the last step.
        steps = min(self.trainer.max_staleness + 1, self.trainer.steps - step + 1)
        await self._queue(steps * self.trainer.tasks_per_step)
        await self._add(batch, self.trainer.tasks_per_step, staleness, on_progress)
        return batch

    async def more(self, count: int, staleness: Staleness | None, on_progress: OnProgress) -> StepBatch:
        """`count` further groups, in place of those without a signal."""
        batch = StepBatch()
        await self._add(batch, count, staleness, on_progress)  # which queues what is missing
        return batch

    async def leave(self, batch: StepBatch, step: int) -> None:
        """Cancels what is left and no later step will need, as overprovisioned rollouts of this step."""
        last = step == self.trainer.steps
        if self._outstanding and (last or self.trainer.max_staleness == 0):
            rest = [rollout for group in self._outstanding.values() for rollout in group.rollouts]
            # Before the step's list is written: what a kill in between leaves cancelled, the next process discards.
            if running := [one for group in self._outstanding.values() for one in group.running]:
                await self.store.cancel(running)
            self.collector.forget(rollout.id for rollout in rest)
            self._outstanding.clear()
            batch.discarded |= {rollout.id: "overprovisioned" for rollout in rest}

    def forget(self) -> None:
        """Read everything from the store again: the steps go back to a checkpoint."""
        self.collector.forget(one.id for group in self._outstanding.values() for one in group.rollouts)
        self._outstanding.clear()
        self._read = False

    async def _find(self) -> None:
        """Reads what an earlier process queued, and the number at which it stopped."""
        # Before the rollouts are read: one that finished in between would be waited for without end.
        await self.collector.begin()
        of_run = RolloutQuery(run_id=self.run_id, mode="train", unconsumed=True)
        self._hold([each for each in await self.store.rollouts(of_run) if _is_ours(each)])
        # The newest group may be consumed already; one group's worth of the newest rollouts holds the highest number.
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
        spent = [group for group in self._outstanding.values() if not group.left and nothing_to_learn(group.rollouts)]
        for group in spent:
            del self._outstanding[group.number]
        return [rollout for group in spent for rollout in group.rollouts]

    async def _queue(self, wanted: int) -> None:
        """Queues groups until `wanted` are outstanding. A group is enqueued in one transaction: never a part of it."""
        at_a_time = max(1, ENQUEUE_BATCH // self.group_size)
        begin = self.group_size if self.trees is None else self.trees.tree.roots
        while (missing := wanted - len(self._outstanding)) > 0:
            first, self._next = self._next, self._next + min(missing, at_a_time)
            tasks = {number: await self._task(number) for number in range(first, self._next)}
            new = [one for number, task in tasks.items() for one in self._group(number, task)[:begin]]
            # One with an outcome was consumed before: a clock that went back hid its number from `_find`.
            self._hold([rollout for rollout in await self.store.enqueue(new) if rollout.outcome is None])

    async def _task(self, number: int) -> JSON:
        """Of a group that is queued for the first time."""
        if self.sampled is None:
            (position,) = self._order.step(number + 1)
            return self.tasks[position]
        step, place = divmod(number, self.trainer.tasks_per_step)
        return (await self.sampled.draw(step + 1, self._step, self.trainer.tasks_per_step))[place]

    def _group(self, number: int, task: JSON) -> list[NewRollout]:
        step, place = divmod(number, self.trainer.tasks_per_step)
        return [
            NewRollout(
                run_id=self.run_id,
                task=task,
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
            if new := await self.trees.next_round(group.rollouts, self._group(group.number, group.rollouts[0].task)):
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

    async def _add(self, batch: StepBatch, count: int, staleness: Staleness | None, on_progress: OnProgress) -> None:
        for group in await self._complete(batch, count, staleness, on_progress):
            del self._outstanding[group.number]
            batch.groups.add(group.rollouts[0].group_id)
            batch.rollouts += [rollout for rollout in group.rollouts if rollout.state != "cancelled"]
            batch.discarded |= {one.id: _why_cancelled(one, staleness) for one in group.cancelled}

    def _drop_cancelled(self, batch: StepBatch, staleness: Staleness | None) -> None:
        """Groups of which nothing is left."""
        for group in [each for each in self._outstanding.values() if len(each.cancelled) == len(each.rollouts)]:
            del self._outstanding[group.number]
            batch.discarded |= {one.id: _why_cancelled(one, staleness) for one in group.rollouts}

    async def _complete(
        self, batch: StepBatch, count: int, staleness: Staleness | None, on_progress: OnProgress
    ) -> list[_Group]:
        """Waits for the groups that a step takes."""
        while True:
            # State first, then the decision, then the wait, which returns at once for what finished in between.
            self._note_finished()
            self._drop_cancelled(batch, staleness)
            await self._queue(count)
            await self._fork()
            ready = self._ready(count)
            if ready is not None:
                return ready
            wanted = list(self._outstanding.values())[: count if self._in_order else None]
            # Of unordered groups the `count` that have least left: the estimate never exceeds what the step waits for.
            left = sum(sorted(group.left for group in wanted)[:count])
            on_progress(count * self.group_size - left, count * self.group_size)
            running = sum(sorted(len(group.running) for group in wanted)[:count])
            await self.collector.wait_finished(running)

    def _ready(self, count: int) -> list[_Group] | None:
        """The groups that a step takes, in the order of their numbers; None where it must wait."""
        groups = list(self._outstanding.values())
        if not self._in_order:
            # Whole groups first: a trainer that was killed may have cancelled parts of those that it did not need.
            groups = sorted((one for one in groups if not one.left), key=lambda one: bool(one.cancelled))
        # By number again: the order within a step depends on the tasks alone, not on which rollout was the fastest.
        chosen = sorted(groups[:count], key=lambda group: group.number)
        return chosen if len(chosen) == count and not any(group.left for group in chosen) else None

    @property
    def _in_order(self) -> bool:
        return self.trainer.batch_order == "fifo"

    def _note_finished(self) -> None:
        for group in self._outstanding.values():
            finished = self.collector.fetch(group.running)
            group.rollouts = [finished.get(rollout.id, rollout) for rollout in group.rollouts]

    async def _cancel_stale(self, staleness: Staleness) -> None:
        """Cancels rollouts that began under weights too old for this step: nothing can be learned from them any more."""
        running = [one for group in self._outstanding.values() for one in group.running]
        found = await self.store.rollouts(RolloutQuery(ids=running)) if running else []
        # Only running ones, as the store has them now: one that waits for another attempt will sample from new weights.
        late = [one.id for one in found if one.state == "running" and _too_old(one, staleness)]
        if late:
            await self.store.cancel(late)


def _is_ours(rollout: Rollout) -> bool:
    return rollout.group_id.startswith(f"{GROUP}:")


def _too_old(rollout: Rollout, staleness: Staleness | None) -> bool:
    return staleness is not None and rollout.started_ns is not None and staleness.began_too_early(rollout.started_ns)


def _why_cancelled(rollout: Rollout, staleness: Staleness | None) -> Outcome:
    return "stale" if _too_old(rollout, staleness) else "overprovisioned"
