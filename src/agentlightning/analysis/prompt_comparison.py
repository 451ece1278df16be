"""Versions of a prompt template side by side: the same tasks, the same model, paired statistics, cost and transcripts.

Driven by ``agl prompts test``. The versions run as evaluation rollouts of a run of their own, each pinned to its version, so
that nothing is trained on them. It decides nothing: whoever reads the numbers promotes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agentlightning.analysis.intervals import Interval, exact_mcnemar, paired_bootstrap
from agentlightning.config import Config
from agentlightning.config_external import ExternalModelConfig
from agentlightning.errors import ConfigError
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.collect import check_calls_recorded
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.external_cost import external_cost, used_tokens
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.serving import serve_model
from agentlightning.types import JSON, Call, NewRollout, Resource, RetryPolicy, Rollout, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFigures:
    """One version over all tasks."""

    version: int
    reward_mean: float
    """One that failed counts as 0."""
    failed: int
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    cost: float | None
    """US dollars of external models; None where no price is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDifference:
    """Rewards of a version less those of the first, task by task."""

    version: int
    baseline: int
    better: int
    worse: int
    difference: Interval | None
    """Of the mean, by a paired bootstrap; None for fewer than two tasks."""
    p_value: float | None
    """McNemar's exact test; None where rewards are other than 0 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One rollout of one version."""

    version: int
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
class PromptComparison:
    """The result of a test."""

    run_id: str
    """The run of its rollouts."""
    name: str
    figures: list[VersionFigures]
    differences: list[VersionDifference]
    tasks: list[TaskComparison]


async def compare_versions(
    config: Config,
    folder: RunFolder,
    progress: Progress,
    versions: Sequence[Resource],
    others: Sequence[Resource],
    tasks: int,
    temperature: float,
) -> PromptComparison:
    """Runs every version on the first held-out tasks, or training tasks where there are none.

    `others`: templates of other names that the rollouts use. ConfigError where the versions are of several templates.
    """
    if len({each.name for each in versions}) > 1 or len({each.version for each in versions}) < 2:
        raise ConfigError("versions: expected two or more versions of one template, NAME@1 NAME@2")
    if temperature and config.agent_model is not None:
        raise ConfigError("--temperature: has no effect on an external model, which samples as the agent asks")
    source = config.data.val or config.data.train
    if source is None:
        raise ConfigError("data.val: is required to test prompts; name held-out tasks")
    rows = load_tasks(source, config.data.fields, config.trainer.seed)[:tasks]
    name = versions[0].name
    async with serve_model(config, folder, progress, f"eval {name} of {versions[0].run_id}") as (collector, processes):
        copies = [
            Resource(run_id=folder.run_id, name=each.name, kind="prompt_template", value=each.value)
            for each in (*others, *versions)
        ]
        stored = (await processes.store.put_resources(copies))[len(others) :]
        new = [
            NewRollout(
                run_id=folder.run_id,
                task=row,
                group_id=f"prompts:{position}",
                replica=replica,
                mode="eval",
                sampling=Sampling(temperature=temperature, max_tokens=config.model.max_tokens),
                retry=RetryPolicy(max_attempts=1, timeout_s=config.agent.timeout_s),
                prompts={name: copy.version},
            )
            for position, row in enumerate(rows)
            for replica, copy in enumerate(stored)
        ]
        rollouts = await processes.beside(collector.collect(new, partial(progress.phase, "test prompts")))
        check_calls_recorded(rollouts)
        calls = await processes.store.calls([each.id for each in rollouts])
    return compared(folder.run_id, versions, rollouts, calls, config.external)


def compared(
    run_id: str,
    versions: Sequence[Resource],
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    external: Mapping[str, ExternalModelConfig],
) -> PromptComparison:
    """The result of finished rollouts: for each task one of each version, in their order."""
    by_rollout: dict[str, list[Call]] = {each.id: [] for each in rollouts}
    for call in calls:
        by_rollout[call.rollout_id].append(call)
    count = len(versions)
    columns = [rollouts[place::count] for place in range(count)]
    numbers = [each.version for each in versions]
    rewards = [[each.reward or 0.0 for each in column] for column in columns]
    return PromptComparison(
        run_id=run_id,
        name=versions[0].name,
        figures=[
            _figures(number, column, [call for each in column for call in by_rollout[each.id]], external)
            for number, column in zip(numbers, columns, strict=True)
        ],
        differences=[
            _difference(number, numbers[0], own, rewards[0])
            for number, own in zip(numbers[1:], rewards[1:], strict=True)
        ],
        tasks=[
            TaskComparison(
                task=row[0].task,
                transcripts=[
                    _transcript(number, each, by_rollout[each.id]) for number, each in zip(numbers, row, strict=True)
                ],
            )
            for row in zip(*columns, strict=True)
        ],
    )


def _figures(
    version: int, rollouts: Sequence[Rollout], calls: Sequence[Call], external: Mapping[str, ExternalModelConfig]
) -> VersionFigures:
    tokens = [used_tokens(call) for call in calls]
    return VersionFigures(
        version=version,
        reward_mean=statistics.fmean(each.reward or 0.0 for each in rollouts),
        failed=sum(each.state != "succeeded" for each in rollouts),
        calls=len(calls),
        prompt_tokens=sum(prompt for prompt, _ in tokens),
        sampled_tokens=sum(sampled for _, sampled in tokens),
        cost=external_cost(calls, external),
    )


def _difference(version: int, baseline: int, own: Sequence[float], others: Sequence[float]) -> VersionDifference:
    differences = [a - b for a, b in zip(own, others, strict=True)]
    better, worse = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    binary = {*own, *others} <= {0.0, 1.0}
    return VersionDifference(
        version=version,
        baseline=baseline,
        better=better,
        worse=worse,
        difference=paired_bootstrap(differences),
        p_value=exact_mcnemar(better, worse) if binary else None,
    )


def _transcript(version: int, rollout: Rollout, calls: Sequence[Call]) -> Transcript:
    return Transcript(
        version=version,
        rollout_id=rollout.id,
        reward=rollout.reward,
        error=rollout.error,
        messages=[message for call in calls for message in (*call.messages, call.completion)],
    )
