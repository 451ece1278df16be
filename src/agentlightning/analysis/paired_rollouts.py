"""Paired rollouts: finished rollouts of the same tasks under several versions, as figures, differences and transcripts.

The comparisons of prompts and of models use it. Pure: knows neither how the rollouts came about nor what a version is.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.analysis.intervals import Interval, exact_mcnemar, paired_bootstrap
from agentlightning.errors import one_line
from agentlightning.records import JSON, Call, Rollout
from agentlightning.trainer.load_trajectories import used_tokens

MAX_REASONS = 10
"""Reasons of failures that are told apart."""
MAX_REASON_CHARS = 160

Version = int | str
"""A number among versions of one name, or a name with its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFigures:
    """The calls of one of the agents that a rollout consists of."""

    calls: int
    prompt_tokens: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFigures:
    """One version over all tasks."""

    version: Version
    reward_mean: float
    """One that failed counts as 0."""
    failed: int
    failures: dict[str, int]
    """Rollouts that failed by the last line of their error, the most frequent first."""
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    agents: dict[str, AgentFigures]
    """By the agents' names; '' for calls of no known agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDifference:
    """Rewards of a version less those of the first, task by task."""

    version: Version
    baseline: Version
    better: int
    worse: int
    difference: Interval | None
    """Of the mean, by a paired bootstrap; None for fewer than two tasks."""
    p_value: float | None
    """McNemar's exact test; None where rewards are other than 0 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One rollout of one version."""

    version: Version
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
class PairedComparison:
    """Versions side by side."""

    figures: list[VersionFigures]
    differences: list[VersionDifference]
    tasks: list[TaskComparison]


def compare_columns(
    versions: Sequence[Version],
    columns: Sequence[Sequence[Rollout]],
    calls: Sequence[Call],
) -> PairedComparison:
    """Finished rollouts of each version in a column, of the same tasks in the same order; the first one is the baseline."""
    by_rollout: dict[str, list[Call]] = {each.id: [] for column in columns for each in column}
    for call in calls:
        by_rollout[call.rollout_id].append(call)
    rewards = [[each.reward or 0.0 for each in column] for column in columns]
    return PairedComparison(
        figures=[
            _figures(version, column, [call for each in column for call in by_rollout[each.id]])
            for version, column in zip(versions, columns, strict=True)
        ],
        differences=[
            _difference(version, versions[0], own, rewards[0])
            for version, own in zip(versions[1:], rewards[1:], strict=True)
        ],
        tasks=[
            TaskComparison(
                task=row[0].task,
                transcripts=[
                    _transcript(version, each, by_rollout[each.id]) for version, each in zip(versions, row, strict=True)
                ],
            )
            for row in zip(*columns, strict=True)
        ],
    )


def _figures(version: Version, rollouts: Sequence[Rollout], calls: Sequence[Call]) -> VersionFigures:
    by_agent: dict[str, list[Call]] = {}
    for call in calls:
        by_agent.setdefault(call.agent or "", []).append(call)
    agents = {name: _agent_figures(own) for name, own in sorted(by_agent.items())}
    failed = [each for each in rollouts if each.state != "succeeded"]
    return VersionFigures(
        version=version,
        reward_mean=statistics.fmean(each.reward or 0.0 for each in rollouts),
        failed=len(failed),
        failures=dict(Counter(map(failure_reason, failed)).most_common(MAX_REASONS)),
        calls=len(calls),
        prompt_tokens=sum(one.prompt_tokens for one in agents.values()),
        sampled_tokens=sum(one.sampled_tokens for one in agents.values()),
        agents=agents,
    )


def failure_reason(rollout: Rollout) -> str:
    """The last line of a rollout's error, which names it in a traceback; the state where there is none."""
    lines = (rollout.error or "").strip().splitlines()
    return one_line(lines[-1].strip())[:MAX_REASON_CHARS] if lines else rollout.state


def _agent_figures(calls: Sequence[Call]) -> AgentFigures:
    tokens = [used_tokens(call) for call in calls]
    return AgentFigures(
        calls=len(calls),
        prompt_tokens=sum(prompt for prompt, _ in tokens),
        sampled_tokens=sum(sampled for _, sampled in tokens),
    )


def _difference(
    version: Version, baseline: Version, own: Sequence[float], others: Sequence[float]
) -> VersionDifference:
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


def _transcript(version: Version, rollout: Rollout, calls: Sequence[Call]) -> Transcript:
    return Transcript(
        version=version,
        rollout_id=rollout.id,
        reward=rollout.reward,
        error=rollout.error,
        messages=[message for call in calls for message in (*call.messages, call.completion)],
    )
