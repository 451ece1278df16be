"""Compare runs: settings that differ, final figures, intervals of paired differences, bands over seeds; the cost of a run.

``agl runs compare``, ``agl runs show`` and the console drive it. Reads two metrics of each run, and the rollouts of its last
evaluation; seven metrics for the cost.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from agentlightning.analysis.intervals import Interval, paired_bootstrap, slope
from agentlightning.analysis.run_settings import SettingDifference, differing, flat_settings, without_seed
from agentlightning.errors import InputError
from agentlightning.records import Run, RunState
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.forks import is_apart
from agentlightning.store.scan import find_run, read_rollouts
from agentlightning.store.summaries import MAX_POINTS, bucket_width
from agentlightning.trainer.data.tasks import content_key

MAX_RUNS = 20
"""Runs of one comparison."""
HELD_OUT = "eval/greedy/reward_mean"
TRAIN = "train/reward_mean"
SLOPE_STEPS = 20
"""Last steps whose training rewards the slope is fitted to."""
NEAR_BEST = 0.9
COSTS: Mapping[str, str] = MappingProxyType(
    {
        "cost/agent_s": "agent seconds",
        "cost/prompt_tokens": "prompt tokens",
        "cost/sampled_tokens": "sampled tokens",
        "cost/fork_agent_s": "agent seconds of forks",
        "cost/fork_sampled_tokens": "sampled tokens of forks",
        "cost/external_tokens": "tokens of external models",
    }
)
"""Names of the amounts that steps use up, by metric."""

Curve = Mapping[int, float]
"""A metric by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of one run. None where the run has no such number (yet)."""

    run_id: str
    name: str
    state: RunState
    step: int | None
    """The last training step."""
    held_out: float | None
    """Mean reward of the last greedy evaluation."""
    held_out_step: int | None
    best: float | None
    best_step: int | None
    near_best_step: int | None
    """The first evaluated step with 90 % of the rise from the first evaluation to the best one; None where nothing rose."""
    slope: Interval | None
    """Change of the training reward a step, over the last SLOPE_STEPS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The difference of two runs over the held-out tasks that both evaluated."""

    run_id: str
    baseline: str
    tasks: int
    """Tasks that both evaluated last."""
    difference: Interval | None
    """Mean reward of the run less the baseline's; of chance over tasks, not over seeds. None for fewer than two tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutChange:
    """A run's held-out reward at its first evaluation and at its last one."""

    first: float
    last: float
    difference: Interval | None
    """Paired difference over the tasks that both evaluated; None for fewer than two."""

    @property
    def verdict(self) -> Literal["learned", "got worse", "no change beyond chance", "too few tasks to tell"]:
        if self.difference is None:
            return "too few tasks to tell"
        if not self.difference.excludes_zero:
            return "no change beyond chance"
        return "learned" if self.difference.value > 0 else "got worse"


@dataclass(frozen=True, slots=True, kw_only=True)
class BandPoint:
    """A metric of several runs at one step."""

    step: int
    mean: float
    low: float
    high: float
    runs: int
    """Runs that have the metric at this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedBand:
    """Runs that differ by their seed alone, and the range of their held-out rewards."""

    run_ids: list[str]
    held_out: list[BandPoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Several runs side by side; the first one is the baseline."""

    figures: list[RunFigures]
    settings: list[SettingDifference]
    differences: list[PairedDifference]
    bands: list[SeedBand]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Amounts that a run's training steps used up; evaluations and repeated attempts are recorded by no step."""

    amounts: dict[str, float]
    """By name; those that no step has recorded are left out."""
    estimated: bool
    """Of a run with more than MAX_POINTS steps only every n-th was read, and stands for n."""


async def compare_runs(store: LightningStore, run_ids: Sequence[str]) -> RunComparison:
    """Compares these runs. InputError where they are not between 2 and MAX_RUNS, NotFoundError where one does not exist."""
    ids = list(dict.fromkeys(run_ids))
    if not 2 <= len(ids) <= MAX_RUNS:
        raise InputError(f"runs: expected 2 to {MAX_RUNS} different runs, got {len(ids)}")
    runs = [await find_run(store, run_id) for run_id in ids]
    settings = [flat_settings(run.config) for run in runs]
    curves = [await read_curve(store, run_id, HELD_OUT) for run_id in ids]
    train = [await read_curve(store, run_id, TRAIN) for run_id in ids]
    lasts = [max(curve, default=None) for curve in curves]
    rewards = [await _evaluation(store, *one) for one in zip(ids, lasts, strict=True)]

    def differences() -> list[PairedDifference]:
        return [paired_difference(ids[at], ids[0], rewards[at], rewards[0]) for at in range(1, len(ids))]

    return RunComparison(
        figures=[run_figures(*one) for one in zip(runs, curves, train, strict=True)],
        settings=differing(settings),
        # In a thread: of 20 runs with 1,000 tasks the resamples take seconds, in which a console answers nobody else.
        differences=await asyncio.to_thread(differences),
        bands=seed_bands(ids, [without_seed(one) for one in settings], curves),
    )


async def read_held_out_change(store: LightningStore, run_id: str, first: int, last: int) -> HeldOutChange | None:
    """The change of the run's held-out reward between the greedy evaluations at two steps; None where either is gone."""
    before, after = [await _evaluation(store, run_id, step) for step in (first, last)]
    if not before or not after:
        return None
    # In a thread, as in `compare_runs`.
    paired = await asyncio.to_thread(paired_difference, run_id, run_id, after, before)
    return HeldOutChange(
        first=statistics.fmean(before.values()), last=statistics.fmean(after.values()), difference=paired.difference
    )


async def read_curve(store: LightningStore, run_id: str, name: str) -> dict[int, float]:
    """A metric by step; what a crash undid is left out, and of several numbers of a step the last one counts."""
    return {metric.step: metric.value for metric in await store.metrics(run_id, name) if not metric.abandoned}


def run_figures(run: Run, held_out: Curve, train: Curve) -> RunFigures:
    """The figures of a run, from its held-out and its training rewards."""
    last, best = max(held_out, default=None), best_step(held_out)
    return RunFigures(
        run_id=run.id,
        name=run.name,
        state=run.state,
        step=max(train, default=run.summary.get("step")),
        held_out=None if last is None else held_out[last],
        held_out_step=last,
        best=None if best is None else held_out[best],
        best_step=best,
        near_best_step=near_best_step(held_out),
        slope=slope(sorted(train.items())[-SLOPE_STEPS:]),
    )


def best_step(curve: Curve) -> int | None:
    """The step of the highest value, the first of several."""
    return min(curve, key=lambda step: (-curve[step], step), default=None)


def near_best_step(curve: Curve) -> int | None:
    """The first step with 90 % of the rise from the first value to the best one; None where nothing rose.

    >>> near_best_step({0: 0.2, 10: 0.6, 20: 0.98, 30: 1.0, 40: 0.9})
    20
    """
    best = best_step(curve)
    if best is None or curve[best] <= curve[min(curve)]:
        return None
    base = curve[min(curve)]
    return min(step for step, value in curve.items() if value >= base + NEAR_BEST * (curve[best] - base))


def paired_difference(
    run_id: str, baseline: str, rewards: Mapping[str, float], of_baseline: Mapping[str, float]
) -> PairedDifference:
    """The difference over the tasks of both. Rewards {a: 1, b: 0.5, c: 1} against {a: 0, b: 0.5}: 0.5 over two tasks."""
    tasks = sorted(rewards.keys() & of_baseline.keys())  # the order decides what a seed draws
    return PairedDifference(
        run_id=run_id,
        baseline=baseline,
        tasks=len(tasks),
        difference=paired_bootstrap([rewards[task] - of_baseline[task] for task in tasks]),
    )


def seed_bands(run_ids: Sequence[str], keys: Sequence[str], curves: Sequence[Curve]) -> list[SeedBand]:
    """Runs of one key as a band: the mean, the lowest and the highest of their values at each step."""
    members: defaultdict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        members[key].append(place)
    found = []
    for places in members.values():
        own = [curves[place] for place in places]
        points = []
        for step in sorted({step for curve in own for step in curve}):
            ys = [curve[step] for curve in own if step in curve]
            points.append(BandPoint(step=step, mean=statistics.fmean(ys), low=min(ys), high=max(ys), runs=len(ys)))
        found.append(SeedBand(run_ids=[run_ids[place] for place in places], held_out=points))
    return found


async def _evaluation(store: LightningStore, run_id: str, step: int | None) -> dict[str, float]:
    """Greedy rewards of the evaluation at `step` by task, as the run's own metric counts them: a failure as 0.

    A repeated evaluation counts with its last replica; a task that stands in the data more than once, with its mean.
    """
    if step is None:
        return {}
    last: dict[str, tuple[int, str, float]] = {}
    async for page in read_rollouts(store, RolloutQuery(run_id=run_id, mode="eval", step=step)):
        for rollout in page:
            if is_apart(rollout) or not rollout.judged:
                continue
            known = last.get(rollout.group_id)
            if rollout.sampling.temperature == 0 and (known is None or rollout.replica >= known[0]):
                last[rollout.group_id] = rollout.replica, content_key(rollout.task), rollout.reward or 0.0
    by_task: defaultdict[str, list[float]] = defaultdict(list)
    for _, task, reward in last.values():
        by_task[task].append(reward)
    return {task: statistics.fmean(rewards) for task, rewards in by_task.items()}


async def read_cost(store: LightningStore, run_id: str) -> RunCost:
    """The cost of a run. NotFoundError where there is no such run."""
    series = await store.series(run_id, list(COSTS), max_points=MAX_POINTS)
    steps = [points[end].step for points in series.values() for end in (0, -1) if points]
    width = bucket_width(min(steps), max(steps), MAX_POINTS) if steps else 1
    sums = {metric: width * math.fsum(point.value for point in points) for metric, points in series.items()}
    amounts = {name: sums[metric] for metric, name in COSTS.items() if metric in sums}
    return RunCost(amounts=amounts, estimated=width > 1)


def amount_text(value: float) -> str:
    """An amount as people read it.

    >>> amount_text(1234567.0), amount_text(0.0123), amount_text(0.0)
    ('1,234,567', '0.0123', '0')
    """
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"
