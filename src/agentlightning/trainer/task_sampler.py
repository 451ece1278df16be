"""Task sampler: which tasks a training step samples, from what the run's earlier steps say of each.

The scheduler drives it as it queues groups. Evidence is read from the store, of earlier steps alone, so that a resumed run,
and one with any number of workers, draws the same tasks. A group that is queued has its task in its rollouts and is never
drawn again.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.errors import AgentError, boundary
from agentlightning.records import JSON, Rollout, Step
from agentlightning.runtime.code_loader import check_signature, load_code
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.summaries import task_key

HALF_LIFE = 10.0
"""Steps after which a try counts half: the policy that made it is another one."""
HORIZON = 60
"""Steps that are looked back on; older tries count less than a fiftieth."""
EXPLORED = 0.1
"""Share of the draws that ignore the evidence: no task is given up."""
PRIOR = 1.0
"""Tries by which a task without evidence is taken to be solved half the time: what nobody knows is worth a look."""
ARGUMENTS = ("tasks", "count", "step", "rng")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """One training task and what the policy earned on it so far."""

    task: JSON
    tries: Sequence[tuple[int, float]] = ()
    """Training step (0: before training) and reward of each rollout of the last steps, the oldest first; a failure earns the
    least. Rewards go from 0, the lowest of the run's tries, to 1, the highest."""

    def pass_rate(self, step: int) -> float:
        """Estimate of the mean reward at `step`: tries count less the older they are, and a prior of one half.

        >>> TaskRecord(task={}).pass_rate(1), TaskRecord(task={}, tries=[(1, 1.0)] * 3).pass_rate(1)
        (0.5, 0.875)
        """
        weights: list[float] = [0.5 ** ((step - made) / HALF_LIFE) for made, _ in self.tries]
        earned = sum(weight * reward for weight, (_, reward) in zip(weights, self.tries, strict=True))
        return (earned + PRIOR / 2) / (sum(weights) + PRIOR)


TaskSampler = Callable[[Sequence[TaskRecord], int, int, random.Random], Sequence[int]]
"""(tasks, count, step, rng) to the positions of `count` tasks."""


def learnability(tasks: Sequence[TaskRecord], count: int, step: int, rng: random.Random) -> list[int]:
    """Draws tasks with probability p (1 - p) of their pass rates p, and a tenth of them evenly; none twice before all once.

    p (1 - p) is the variance of a reward of 0 or 1, and so the size of a group's advantages (Foster and Foerster 2025,
    arXiv 2502.12272).
    """
    rates = [one.pass_rate(step) for one in tasks]
    worth = [rate * (1 - rate) for rate in rates]
    total = sum(worth) or 1.0
    weights = [EXPLORED / len(tasks) + (1 - EXPLORED) * one / total for one in worth]
    # Efraimidis and Spirakis 2006: the largest of u^(1/w) are a weighted draw without replacement.
    keys = [rng.random() ** (1 / weight) for weight in weights]
    order = sorted(range(len(tasks)), key=lambda position: keys[position], reverse=True)
    return [order[place % len(order)] for place in range(count)]


def load_sampler(name: str) -> TaskSampler | None:
    """The sampler that `data.sampler` names; None for uniform. ConfigError, AgentError where it cannot be loaded."""
    if name == "uniform":
        return None
    if name == "learnability":
        return learnability
    found: TaskSampler = load_code(name, "data.sampler")
    check_signature(found, ARGUMENTS, f"data.sampler {name!r}")
    return found


@dataclass(slots=True, kw_only=True)
class SampledTasks:
    """Draws the tasks of one run's steps."""

    store: LightningStore
    run_id: str
    tasks: Sequence[JSON]
    sampler: TaskSampler
    seed: int
    before: Callable[[], Awaitable[Sequence[tuple[str, float | None]]]] | None = None
    """Reads task key and reward of tries before training, once."""
    _positions: dict[str, list[int]] = field(init=False)
    _before: Sequence[tuple[str, float | None]] | None = None
    _steps: dict[int, list[tuple[str, float | None]]] = field(default_factory=dict)
    """By training step, task key and reward of each try; None: it failed."""
    _drawn: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._positions = defaultdict(list)
        for position, task in enumerate(self.tasks):
            self._positions[task_key(task)].append(position)

    async def draw(self, planned: int, step: int, count: int) -> list[JSON]:
        """The tasks of the groups that were planned for one step and are queued in another, which is under way."""
        key = planned, step, count
        if key not in self._drawn:
            records = await self.records(step)
            rng = random.Random(f"{self.seed}:{planned}:{step}")
            with boundary("data.sampler"):
                found: Any = self.sampler(records, count, step, rng)
            self._drawn = {key: _checked(found, count, len(self.tasks))}  # of the last one alone
        return [self.tasks[position] for position in self._drawn[key]]

    async def records(self, step: int) -> list[TaskRecord]:
        """The evidence of the steps before `step`, of each task by position."""
        await self._read(step)
        if self._before is None:
            self._before = () if self.before is None else await self.before()
        tries: list[tuple[int, str, float | None]] = [(0, key, reward) for key, reward in self._before]
        tries += [(made, key, reward) for made, rows in sorted(self._steps.items()) for key, reward in rows]
        known = [reward for _, _, reward in tries if reward is not None]
        low, high = min(known, default=0.0), max(known, default=0.0)
        low = min(low, 0.0) if low == high else low  # all alike: solved if above 0
        found: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        for made, key, reward in tries:
            scaled = 0.0 if reward is None or high <= low else (reward - low) / (high - low)
            for position in self._positions.get(key, ()):
                found[position].append((made, scaled))
        return [TaskRecord(task=task, tries=found[position]) for position, task in enumerate(self.tasks)]

    async def _read(self, step: int) -> None:
        first = max(1, step - HORIZON)
        self._steps = {made: rows for made, rows in self._steps.items() if first <= made < step}
        missing = [made for made in range(first, step) if made not in self._steps]
        if not missing:
            return
        for one in await self.store.steps(self.run_id, after=missing[0] - 1, limit=step - missing[0]):
            if one.step in missing:
                self._steps[one.step] = await self._tries(one)

    async def _tries(self, step: Step) -> list[tuple[str, float | None]]:
        ids = [one.rollout_id for one in step.consumed]
        rollouts = await self.store.rollouts(RolloutQuery(ids=ids)) if ids else []
        by_id = {rollout.id: rollout for rollout in rollouts}
        return [(task_key(by_id[one].task), earned(by_id[one])) for one in ids if one in by_id and is_try(by_id[one])]


def is_try(rollout: Rollout) -> bool:
    """True where a finished rollout says something about its policy."""
    return rollout.state != "cancelled" and rollout.judged


def earned(rollout: Rollout) -> float | None:
    """The reward of a rollout; None where it failed, or has none."""
    return rollout.reward if rollout.state == "succeeded" else None


def _checked(found: Any, count: int, tasks: int) -> list[int]:
    try:
        positions = [int(position) for position in found]
    except (TypeError, ValueError):
        positions = []
    if len(positions) != count or not all(0 <= position < tasks for position in positions):
        raise AgentError(f"data.sampler: expected {count} positions from 0 to {tasks - 1}, got {found!r:.200}")
    return positions
