"""Two models side by side: the same tasks, settings and seeds, paired statistics, and a test that may stop early.

Driven by ``agl models compare``. Each model is served by a run of its own; both runs use one server and one store. It
decides nothing: whoever reads the numbers promotes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from agentlightning.algorithms.sequential_tests import sign_test_wealth
from agentlightning.analysis.paired_rollouts import PairedComparison, compare_columns
from agentlightning.config.run import Config
from agentlightning.errors import AgentError, ConfigError
from agentlightning.records import JSON, NewRollout, RetryPolicy, Rollout, Sampling
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import RolloutCollector, check_calls_recorded
from agentlightning.trainer.serving import serve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """One side of a comparison."""

    name: str
    """As it was named."""
    config: Config
    """With this model, and otherwise like the other side's."""


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
class ModelComparison(PairedComparison):
    """The result."""

    runs: dict[str, str]
    """By model, the run of its rollouts."""
    sequential: SequentialResult | None
    """None: all tasks were run."""


async def compare_models(
    models: tuple[ComparedModel, ComparedModel],
    folders: tuple[RunFolder, RunFolder],
    progress: Progress,
    rule: ComparisonRule,
) -> ModelComparison:
    """Runs both models on the held-out tasks, in batches of which both finish one before the next.

    ConfigError where there are none, or the two have one name; NoCallsError where no rollout of a model reached the gateway,
    AgentError where every one of both failed.
    """
    first, second = models
    if first.name == second.name:
        raise ConfigError(f"{first.name}: expected two models that differ")
    config = first.config
    rows = _rows(config, rule)
    async with (
        serve_model(first.config, folders[0], progress, f"eval {first.name} beside {second.name}") as (one, processes),
        serve_model(second.config, folders[1], progress, f"eval {second.name} beside {first.name}", processes) as (
            other,
            others,
        ),
    ):
        work = _run_pairs((one, other), rows, config, rule, progress)
        columns = await processes.beside(others.beside(work))
        for column in columns:
            check_calls_recorded(column)
        calls = await processes.store.calls([each.id for column in columns for each in column])
    if all(each.state != "succeeded" for column in columns for each in column):
        raise AgentError(f"every rollout of both models failed, the first with: {columns[0][0].error}")
    found = compare_columns([first.name, second.name], columns, calls)
    return ModelComparison(
        figures=found.figures,
        differences=found.differences,
        tasks=found.tasks,
        runs={first.name: folders[0].run_id, second.name: folders[1].run_id},
        sequential=_sequential(found, rule, len(rows)),
    )


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


def _rows(config: Config, rule: ComparisonRule) -> list[JSON]:
    source = config.data.val or config.data.train
    if source is None:
        raise ConfigError("data.val: is required to compare models; name held-out tasks with --tasks")
    if rule.temperature and config.agent_model is not None:
        raise ConfigError("--temperature: has no effect on an external model, which samples as the agent asks")
    rows = load_tasks(source, config.trainer.seed)[: rule.tasks]
    config.prompts.check_fields(rows[0], config.agent.command is not None)
    if rule.alpha is not None:  # a file may be sorted, easy tasks first: the test is about tasks in no order
        random.Random(config.trainer.seed).shuffle(rows)
    return rows


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
        for column, collector in zip(columns, collectors, strict=True):
            new = [
                NewRollout(
                    run_id=collector.run_id,
                    task=row,
                    group_id=f"compare:{position}",
                    mode="eval",
                    sampling=Sampling(temperature=rule.temperature, max_tokens=config.model.max_tokens),
                    retry=RetryPolicy(max_attempts=1, timeout_s=config.agent.timeout_s),
                )
                for position, row in enumerate(rows[start : start + batch], start)
            ]
            column += await collector.collect(new, partial(progress.phase, "compare models"))
        if rule.alpha is not None and decided(*_pairs(columns), rule.alpha) is not None:
            break
    return columns


def _pairs(columns: tuple[Sequence[Rollout], Sequence[Rollout]]) -> tuple[int, int]:
    """Numbers of pairs in which the second earned more, and less."""
    differences = [(other.reward or 0.0) - (one.reward or 0.0) for one, other in zip(*columns, strict=True)]
    return sum(each > 0 for each in differences), sum(each < 0 for each in differences)


def _sequential(found: PairedComparison, rule: ComparisonRule, tasks: int) -> SequentialResult | None:
    if rule.alpha is None:
        return None
    [difference] = found.differences
    first, second = str(difference.baseline), str(difference.version)
    better, worse = difference.better, difference.worse
    return SequentialResult(
        alpha=rule.alpha,
        better={"better": second, "worse": first, None: None}[decided(better, worse, rule.alpha)],
        wealth={second: sign_test_wealth(better, worse), first: sign_test_wealth(worse, better)},
        bound=2 / rule.alpha,
        tasks_left=tasks - len(found.tasks),
    )
