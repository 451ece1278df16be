"""Task rates: how often each task of a stored run was solved, by the step whose weights tried it.

`agl runs show RUN --tasks` and `agl check --attempts` print it. A try is a finished rollout that says something about its
policy; it is solved where it earned the highest reward of them all. Reads a page of rollouts at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentlightning.analysis.intervals import Interval, wilson
from agentlightning.errors import InputError
from agentlightning.records import Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.forks import is_apart
from agentlightning.store.scan import find_run, read_rollouts
from agentlightning.store.summaries import task_key, title_of
from agentlightning.trainer.task_sampler import earned, is_try

Kind = Literal["never", "sometimes", "always"]
KINDS: tuple[Kind, ...] = ("never", "sometimes", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRate:
    """The pass rate of one task."""

    key: str
    """Hash of the task's content, the same in every run."""
    title: str
    tag: str
    """Value of the field that was asked for; '' without one."""
    kind: Kind
    rate: Interval
    steps: list[tuple[int, int, int]]
    """(step, solved, tries), by the training step that they were enqueued for: its weights are those of the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagRate:
    """The tasks of one tag: how many of each kind, and the share of all their tries that solved."""

    tag: str
    tasks: dict[str, int]
    rate: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """The pass rates of a run's tasks, hardest first."""

    run_id: str
    highest: float | None
    """The reward that counts as solved; None where there was no reward above the lowest."""
    tags: list[TagRate]
    """All tasks first, with the tag ''."""
    tasks: list[TaskRate]


@dataclass(slots=True)
class _Tries:
    title: str
    tag: str
    rewards: list[tuple[int, float | None]] = field(default_factory=list)


async def read_task_rates(store: LightningStore, run_id: str, tag: str | None = None) -> TaskReport:
    """The rates of a run's tasks. NotFoundError for an unknown run, InputError where no task has the field `tag`."""
    await find_run(store, run_id)
    found = _Found(tag)
    async for page in read_rollouts(store, RolloutQuery(run_id=run_id, mode="train", states=["succeeded", "failed"])):
        found.add(page)
    return found.report(run_id)


def task_rates(run_id: str, rollouts: Sequence[Rollout]) -> TaskReport:
    """The rates of the tasks of these finished rollouts."""
    found = _Found(None)
    found.add(rollouts)
    return found.report(run_id)


@dataclass(slots=True)
class _Found:
    tag: str | None
    tasks: dict[str, _Tries] = field(default_factory=dict)
    tagged: bool = False

    def add(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            if is_apart(rollout) or not is_try(rollout):
                continue
            key = task_key(rollout.task)
            if key not in self.tasks:
                tag = "" if self.tag is None else str(rollout.task.get(self.tag, ""))
                self.tagged |= self.tag in rollout.task
                self.tasks[key] = _Tries(title_of(rollout.task), tag)
            self.tasks[key].rewards.append((rollout.step, earned(rollout)))

    def report(self, run_id: str) -> TaskReport:
        if self.tag is not None and self.tasks and not self.tagged:
            raise InputError(f"--tag: no task of {run_id} has the field {self.tag!r}")
        given = [reward for one in self.tasks.values() for _, reward in one.rewards if reward is not None]
        solved_at = solving_reward(given)
        tasks = [_rate(key, one, solved_at) for key, one in self.tasks.items()]
        tasks.sort(key=lambda one: (one.rate.value, one.title))
        tags = sorted({one.tag for one in tasks}) if self.tag is not None else []
        by_tag = [_tag(tag, [one for one in tasks if one.tag == tag]) for tag in tags]
        return TaskReport(run_id=run_id, highest=solved_at, tags=[_tag("", tasks), *by_tag], tasks=tasks)


def solving_reward(rewards: Sequence[float]) -> float | None:
    """The reward from which a try solved its task, of the rewards of all tries: the highest; None where nothing solved. All
    alike, they solved if they are above 0.

    >>> solving_reward([0.0, 0.5]), solving_reward([1.0, 1.0]), solving_reward([0.0])
    (0.5, 1.0, None)
    """
    highest = max(rewards, default=0.0)
    return None if min(rewards, default=0.0) == highest and highest <= 0 else highest


def _rate(key: str, tries: _Tries, solved_at: float | None) -> TaskRate:
    by_step: defaultdict[int, list[bool]] = defaultdict(list)
    for step, reward in tries.rewards:
        by_step[step].append(solved_at is not None and reward is not None and reward >= solved_at)
    steps = [(step, sum(solved), len(solved)) for step, solved in sorted(by_step.items())]
    rate = wilson(sum(solved for _, solved, _ in steps), sum(count for _, _, count in steps))
    kind: Kind = "never" if rate.value == 0 else "always" if rate.value == 1 else "sometimes"
    return TaskRate(key=key, title=tries.title, tag=tries.tag, kind=kind, rate=rate, steps=steps)


def _tag(tag: str, tasks: Sequence[TaskRate]) -> TagRate:
    kinds = Counter(one.kind for one in tasks)
    solved = sum(solved for one in tasks for _, solved, _ in one.steps)
    rate = wilson(solved, sum(one.rate.n for one in tasks))
    return TagRate(tag=tag, tasks={kind: kinds[kind] for kind in KINDS}, rate=rate)
