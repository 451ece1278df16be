"""Alert rules: a user's own bounds as health checks, and checks of what no training step shows: queue, disk, silence.

`metric_logger.py` asks both. Pure: the same numbers give the same sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentlightning.config.alerts import AlertRuleConfig
from agentlightning.errors import ConfigError
from agentlightning.trainer.monitor.health_checks import HEALTH_CHECKS, Alarm, HealthCheck, History
from agentlightning.trainer.monitor.metrics import METRICS

MIN_FREE_BYTES = 2**30
"""Free space of the run's folder below which it is told: a checkpoint more may not fit."""
WORKERLESS_S = 120.0
"""Seconds without any worker, while rollouts wait, before it is told: workers are started again within a minute."""
QUEUED_S = 1800.0
SILENT_S = 1800.0
"""Seconds without a step or an evaluation from which it may be told."""
SILENT_TIMES = 10
"""It also has to be this many times the longest pause between two rows so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The state of a run at a moment between its steps."""

    queued: int = 0
    oldest_queued_s: float = 0.0
    workerless_s: float = 0.0
    """Seconds for which rollouts have waited and no worker was seen."""
    free_bytes: int = MIN_FREE_BYTES
    """Of the disk that holds the run's folder."""
    silent_s: float = 0.0
    """Seconds since a step or an evaluation was recorded; 0 before the first of this process."""
    longest_pause_s: float = 0.0
    """The longest time between two of them; 0 before the second."""


LoadCheck = Callable[[Load], str | None]
"""The warning; None where all is well."""


def alert_checks(rules: Mapping[str, AlertRuleConfig]) -> dict[str, HealthCheck]:
    """The rules of ``[alerts.rules]`` as health checks, by name.

    ConfigError where one has the name of a check that stands, or names a metric that no training step has.
    """
    for name, rule in rules.items():
        if name in HEALTH_CHECKS or name in LOAD_CHECKS:
            raise ConfigError(f"alerts.rules.{name}: expected another name, a check of the trainer has this one")
        if not _is_known(rule.metric):
            raise ConfigError(
                f"alerts.rules.{name}.metric: expected a metric of docs/metrics.md without the policy before it, got "
                f"{rule.metric[:80]!r}"
            )
    return {name: _check(rule) for name, rule in rules.items()}


def load_alarms(load: Load) -> list[Alarm]:
    """The alarms of a moment, in the order of the checks."""
    return [Alarm(name, text) for name, check in LOAD_CHECKS.items() if (text := check(load)) is not None]


def queue_without_workers(load: Load) -> str | None:
    if not load.queued or load.workerless_s < WORKERLESS_S:
        return None
    return (
        f"{load.queued} rollouts wait and no worker was seen for {_minutes(load.workerless_s)}: start some with agl worker, "
        "or look at the labels that the run asks for (agent.labels)"
    )


def queue_old(load: Load) -> str | None:
    if load.oldest_queued_s < QUEUED_S or load.workerless_s >= WORKERLESS_S:
        return None
    return (
        f"a rollout has waited {_minutes(load.oldest_queued_s)} for a worker, and {load.queued} wait: add workers, or raise "
        "agent.concurrency; agl runs bottlenecks RUN says what bounds the run"
    )


def disk_filling(load: Load) -> str | None:
    if load.free_bytes >= MIN_FREE_BYTES:
        return None
    return (
        f"{load.free_bytes / 2**20:,.0f} MiB are left on the disk of the run's folder: free some with agl runs "
        "prune, or lower trainer.keep_checkpoints; a checkpoint that does not fit ends the run"
    )


def run_silent(load: Load) -> str | None:
    if not load.longest_pause_s or load.silent_s < max(SILENT_S, SILENT_TIMES * load.longest_pause_s):
        return None
    return (
        f"no step ended for {_minutes(load.silent_s)}, {load.silent_s / load.longest_pause_s:.0f} times the longest pause "
        f"before ({_minutes(load.longest_pause_s)}): look at agl rollouts list RUN and at the run's logs folder"
    )


LOAD_CHECKS: dict[str, LoadCheck] = {
    "queue_without_workers": queue_without_workers,
    "queue_old": queue_old,
    "disk_filling": disk_filling,
    "run_silent": run_silent,
}


def _is_known(metric: str) -> bool:
    return metric in METRICS or any(
        metric.startswith(group) and len(metric) > len(group) for group in ("rewards/", "air/", "rollout/broken_spans/")
    )


def _check(rule: AlertRuleConfig) -> HealthCheck:
    def check(history: History) -> str | None:
        values = history.values(rule.metric)[-rule.steps :]
        if len(values) < rule.steps:
            return None
        lasting = f"in all of the last {rule.steps} steps" if rule.steps > 1 else "in the last step"
        if rule.above is not None and all(value > rule.above for value in values):
            return f"{rule.metric} is {values[-1]:.4g}, above {rule.above:g} {lasting}"
        if rule.below is not None and all(value < rule.below for value in values):
            return f"{rule.metric} is {values[-1]:.4g}, below {rule.below:g} {lasting}"
        return None

    return check


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
