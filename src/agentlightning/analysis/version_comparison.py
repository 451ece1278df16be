"""Versions of a prompt template, or two models, on the same tasks: figures, paired statistics, transcripts.

``agl prompts test`` and ``agl models compare`` drive it. Rollouts are evaluations of runs of their own, so that nothing is
trained on them; two models are served at once and may stop by a sequential test. It decides nothing: whoever reads the
numbers promotes.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from agentlightning.algorithms.sequential_tests import sign_test_wealth
from agentlightning.analysis.intervals import Interval, exact_mcnemar, paired_bootstrap
from agentlightning.config.run import Config
from agentlightning.errors import AgentError, ConfigError, InfrastructureError, one_line
from agentlightning.records import JSON, Call, NewRollout, Resource, RetryPolicy, Rollout, Sampling
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.load_trajectories import used_tokens
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import RolloutCollector, check_calls_recorded
from agentlightning.trainer.serving import serve_model

MAX_REASONS = 10
"""Reasons of failures that are counted separately."""
MAX_REASON_CHARS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFigures:
    """One version over all tasks."""

    version: str
    reward_mean: float
    """One that failed counts as 0."""
    failed: int
    failures: dict[str, int]
    """Rollouts that failed by the last line of their error, the most frequent first."""
    calls: int
    prompt_tokens: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDifference:
    """Rewards of a version less those of the first, task by task."""

    version: str
    baseline: str
    better: int
    worse: int
    difference: Interval | None
    """Of the mean, by a paired bootstrap; None for fewer than two tasks."""
    p_value: float | None
    """McNemar's exact test; None where rewards are other than 0 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One rollout of one version."""

    version: str
    rollout_id: str
    reward: float | None
    error: str | None
    messages: list[JSON]
    """All calls of its last attempt in order: messages that no earlier call had, and the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """One task under every version, in the order in which they were named."""

    task: JSON
    transcripts: list[Transcript]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialResult:
    """The outcome of the sequential test."""

    alpha: float
    better: str | None
    """The model that was shown to be better; None: neither was."""
    wealth: dict[str, float]
    """By model, the evidence that it is the better one; 2 / alpha decides."""
    bound: float
    tasks_left: int
    """Tasks that were not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """Versions side by side; the first one is the baseline."""

    runs: dict[str, str]
    """By version, the run of its rollouts."""
    figures: list[VersionFigures]
    differences: list[VersionDifference]
    tasks: list[TaskComparison]
    sequential: SequentialResult | None = None
    """None: all tasks were run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRule:
    """The extent of a comparison."""

    tasks: int | None = None
    """Held-out tasks at most; None: all."""
    temperature: float = 0.0
    """0 is greedy."""
    alpha: float | None = None
    """Stop as soon as one model is shown to be better, with this probability at most that neither is. None: run all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """One side of a comparison of models."""

    name: str
    """As it was named."""
    config: Config
    """With this model, and otherwise like the other side's."""


async def compare_prompts(
    config: Config,
    folder: RunFolder,
    progress: Progress,
    versions: Sequence[Resource],
    others: Sequence[Resource],
    rule: ComparisonRule,
) -> PairedComparison:
    """Runs every version of a template on the first held-out tasks, or training tasks where there are none.

    `others`: templates of other names that the rollouts use. ConfigError where the versions are of several templates.
    """
    if len({each.name for each in versions}) > 1 or len({each.version for each in versions}) < 2:
        raise ConfigError("versions: expected two or more versions of one template, NAME@1 NAME@2")
    rows, name = _rows(config, rule), versions[0].name
    async with serve_model(config, folder, progress, f"eval {name} of {versions[0].run_id}") as (collector, processes):
        copies = [
            Resource(run_id=folder.run_id, name=each.name, kind="prompt_template", value=each.value)
            for each in (*others, *versions)
        ]
        stored = (await processes.store.put_resources(copies))[len(others) :]
        new = [
            _new_rollout(config, folder.run_id, rule, place, row, replica, {name: copy.version})
            for place, row in enumerate(rows)
            for replica, copy in enumerate(stored)
        ]
        rollouts = await processes.beside(collector.collect(new, partial(progress.phase, "test prompts")))
        check_calls_recorded(rollouts)
        calls = await processes.store.calls([each.id for each in rollouts])
    columns = [rollouts[place :: len(versions)] for place in range(len(versions))]
    runs = {f"{name}@{each.version}": folder.run_id for each in versions}
    return compare_columns(runs, columns, calls)


async def compare_models(
    models: tuple[ComparedModel, ComparedModel],
    folders: tuple[RunFolder, RunFolder],
    progress: Progress,
    rule: ComparisonRule,
) -> PairedComparison:
    """Runs both models on the held-out tasks, in batches of which both finish one before the next.

    ConfigError where there are none, or the two have one name; NoCallsError where no rollout of a model reached the gateway,
    AgentError where every one of both failed.
    """
    first, second = models
    if first.name == second.name:
        raise ConfigError(f"{first.name}: expected two models that differ")
    config = first.config
    rows = _rows(config, rule)
    config.check_tasks(rows)
    if rule.alpha is not None:  # a file may be sorted, easy tasks first: the test is about tasks in no order
        random.Random(config.trainer.seed).shuffle(rows)
    titles = [f"eval {a.name} beside {b.name}" for a, b in ((first, second), (second, first))]
    async with (
        serve_model(config, folders[0], progress, titles[0]) as (one, processes),
        serve_model(second.config, folders[1], progress, titles[1], processes) as (other, others),
    ):
        columns = await processes.beside(others.beside(_run_pairs((one, other), rows, config, rule, progress)))
        for column in columns:
            check_calls_recorded(column)
        calls = await processes.store.calls([each.id for column in columns for each in column])
    if all(each.state != "succeeded" for column in columns for each in column):
        raise AgentError(f"every rollout of both models failed, the first with: {columns[0][0].error}")
    runs = {one.name: folder.run_id for one, folder in zip(models, folders, strict=True)}
    return compare_columns(runs, columns, calls, rule.alpha, len(rows))


def decided(better: int, worse: int, alpha: float) -> Literal["better", "worse"] | None:
    """The side that pairs which differ show to be better, by the sign test in both directions; None: neither yet.

    Looking after every pair, it names one with probability alpha at most while each is as likely to win a pair: alpha / 2
    for either direction.

    >>> decided(8, 0, 0.05), decided(0, 7, 0.05), decided(4, 4, 0.05)
    ('better', None, None)
    """
    if sign_test_wealth(better, worse) >= 2 / alpha:
        return "better"
    return "worse" if sign_test_wealth(worse, better) >= 2 / alpha else None


def compare_columns(
    runs: Mapping[str, str],
    columns: Sequence[Sequence[Rollout]],
    calls: Sequence[Call],
    alpha: float | None = None,
    tasks: int = 0,
) -> PairedComparison:
    """Finished rollouts of each version of `runs` in a column, of the same tasks in the same order.

    A task on which one of them was not judged is left out. alpha: of the sequential test that ended them before all
    `tasks` were run.
    """
    pairs = [row for row in zip(*columns, strict=True) if all(each.judged for each in row)]
    if not pairs:
        raise InfrastructureError(
            f"no task could be judged, the first with: {columns[0][0].error or columns[-1][0].error}"
        )
    columns = [list(column) for column in zip(*pairs, strict=True)]
    by_rollout: dict[str, list[Call]] = {each.id: [] for column in columns for each in column}
    for call in calls:
        by_rollout[call.rollout_id].append(call)
    versions = list(runs)
    rewards = [[each.reward or 0.0 for each in column] for column in columns]
    differences = [
        _difference((version, versions[0]), own, rewards[0])
        for version, own in zip(versions[1:], rewards[1:], strict=True)
    ]
    rows = [
        TaskComparison(
            task=row[0].task,
            transcripts=[
                _transcript(name, each, by_rollout[each.id]) for name, each in zip(versions, row, strict=True)
            ],
        )
        for row in zip(*columns, strict=True)
    ]
    return PairedComparison(
        runs=dict(runs),
        figures=[_figures(name, column, by_rollout) for name, column in zip(versions, columns, strict=True)],
        differences=differences,
        tasks=rows,
        sequential=None if alpha is None else _sequential(differences[0], alpha, tasks - len(rows)),
    )


def _rows(config: Config, rule: ComparisonRule) -> list[JSON]:
    source = config.data.val or config.data.train
    if source is None:
        raise ConfigError("data.val: is required for a comparison; name held-out tasks")
    if rule.temperature and config.agent_model is not None:
        raise ConfigError("--temperature: has no effect on an external model, which samples as the agent asks")
    return load_tasks(source, config.trainer.seed)[: rule.tasks]


def _new_rollout(
    config: Config,
    run_id: str,
    rule: ComparisonRule,
    place: int,
    row: JSON,
    replica: int = 0,
    prompts: dict[str, int] | None = None,
) -> NewRollout:
    return NewRollout(
        run_id=run_id,
        task=row,
        group_id=f"compare:{place}",
        replica=replica,
        mode="eval",
        sampling=Sampling(temperature=rule.temperature, max_tokens=config.model.max_tokens),
        retry=RetryPolicy(max_attempts=1, timeout_s=config.agent.timeout_s),
        prompts=prompts or {},
    )


async def _run_pairs(
    collectors: tuple[RolloutCollector, RolloutCollector],
    rows: Sequence[JSON],
    config: Config,
    rule: ComparisonRule,
    progress: Progress,
) -> tuple[list[Rollout], list[Rollout]]:
    """The finished rollouts of both, task by task, until the test or the tasks have ended."""
    batch = len(rows) if rule.alpha is None else max(1, config.agent.workers) * config.agent.concurrency
    columns: tuple[list[Rollout], list[Rollout]] = [], []
    for start in range(0, len(rows), batch):
        some = list(enumerate(rows))[start : start + batch]
        for column, collector in zip(columns, collectors, strict=True):
            new = [_new_rollout(config, collector.run_id, rule, place, row) for place, row in some]
            column += await collector.collect(new, partial(progress.phase, "compare models"))
        better, worse = _wins((b.reward or 0.0) - (a.reward or 0.0) for a, b in zip(*columns, strict=True))
        if rule.alpha is not None and decided(better, worse, rule.alpha) is not None:
            break
    return columns


def _wins(differences: Iterable[float]) -> tuple[int, int]:
    """Numbers of pairs in which the second earned more, and less."""
    known = list(differences)
    return sum(each > 0 for each in known), sum(each < 0 for each in known)


def _figures(version: str, rollouts: Sequence[Rollout], by_rollout: Mapping[str, Sequence[Call]]) -> VersionFigures:
    tokens = [used_tokens(call) for each in rollouts for call in by_rollout[each.id]]
    failed = [each for each in rollouts if each.state != "succeeded"]
    return VersionFigures(
        version=version,
        reward_mean=statistics.fmean(each.reward or 0.0 for each in rollouts),
        failed=len(failed),
        failures=dict(Counter(map(failure_reason, failed)).most_common(MAX_REASONS)),
        calls=len(tokens),
        prompt_tokens=sum(prompt for prompt, _ in tokens),
        sampled_tokens=sum(sampled for _, sampled in tokens),
    )


def failure_reason(rollout: Rollout) -> str:
    """The last line of a rollout's error, which names it in a traceback; the state where there is none."""
    lines = (rollout.error or "").strip().splitlines()
    return one_line(lines[-1].strip())[:MAX_REASON_CHARS] if lines else rollout.state


def _difference(names: tuple[str, str], own: Sequence[float], others: Sequence[float]) -> VersionDifference:
    differences = [a - b for a, b in zip(own, others, strict=True)]
    better, worse = _wins(differences)
    binary = {*own, *others} <= {0.0, 1.0}
    return VersionDifference(
        version=names[0],
        baseline=names[1],
        better=better,
        worse=worse,
        difference=paired_bootstrap(differences),
        p_value=exact_mcnemar(better, worse) if binary else None,
    )


def _transcript(version: str, rollout: Rollout, calls: Sequence[Call]) -> Transcript:
    return Transcript(
        version=version,
        rollout_id=rollout.id,
        reward=rollout.reward,
        error=rollout.error,
        messages=[message for call in calls for message in (*call.messages, call.completion)],
    )


def _sequential(found: VersionDifference, alpha: float, left: int) -> SequentialResult:
    first, second, better, worse = found.baseline, found.version, found.better, found.worse
    return SequentialResult(
        alpha=alpha,
        better={"better": second, "worse": first, None: None}[decided(better, worse, alpha)],
        wealth={second: sign_test_wealth(better, worse), first: sign_test_wealth(worse, better)},
        bound=2 / alpha,
        tasks_left=left,
    )
