"""Run an agent without training its model: to check it, to evaluate it, or to record rollouts for offline training.

Driven by ``agl check``, ``agl eval`` and ``agl record``.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Literal

from agentlightning.config.run import Config
from agentlightning.errors import AgentError, AgentLightningError, ConfigError, NoCallsError
from agentlightning.records import JSON, Attempt, Call, RetryPolicy, Reward, Rollout
from agentlightning.store.scan import read_feedback
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.evaluate import TEMPERATURES, Kind, run_held_out, summarize
from agentlightning.trainer.monitor.health_checks import MIN_SUCCESS
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import check_calls_recorded
from agentlightning.trainer.schedules import algorithms_of
from agentlightning.trainer.serving import CHECK, rollouts_of, serve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One rollout in full, and the base model's success."""

    rollout: Rollout
    attempts: list[Attempt]
    calls: list[Call]
    rewards: list[Reward]
    feedback: str = ""
    """Words that came with them; '' where there are none."""
    success: float
    """Mean final reward at the training temperature over the first training tasks."""
    tasks: int
    """Tasks that this rests on."""
    spread: float
    """Between the highest and the lowest of those rewards."""
    trains: bool = True
    """False for an external model."""

    @property
    def failure(self) -> AgentLightningError | None:
        """The error with which the check ends; None where training could begin."""
        if self.rollout.state != "succeeded":
            why = f": {self.rollout.warning}" if self.rollout.refused else "; its error is above"
            return AgentError(f"the agent failed on the first task{why}")
        if not self.calls:
            return NoCallsError(f"there would be nothing to learn from: {self.rollout.warning}")
        return None

    @property
    def warning(self) -> str | None:
        """A sentence where training could learn little from such rewards; None where it can."""
        if self.success < MIN_SUCCESS:
            low = f"base success {self.success:.2f} over {self.tasks} tasks is below {MIN_SUCCESS}"
            if not self.trains:
                return f"{low}: other prompts could hardly be compared; begin with easier tasks"
            return f"{low}: most groups would have nothing to compare; warm-start the model, or begin with easier tasks"
        if self.spread == 0 and self.tasks > 1:
            return (
                f"all {self.tasks} tasks earned {self.success:g}: a reward that is always the same teaches nothing; check "
                "the reward function, or take harder tasks"
            )
        return None


def _source(config: Config, split: Literal["train", "val"]) -> str:
    source = config.data.train if split == "train" else config.data.val
    if source is None:
        raise ConfigError(f"data.{split}: is required; name the tasks to run the agent on")
    return source


def _tasks(config: Config, source: str, most: int | None) -> list[JSON]:
    rows = load_tasks(source, config.trainer.seed)[:most]
    config.prompts.check_fields(rows[0], config.agent.command is not None)
    return rows


async def evaluate_model(config: Config, folder: RunFolder, progress: Progress, name: str) -> dict[str, float]:
    """Held-out success of the configured model: ``{"greedy": …, "sampled": …}``, of an external one ``{"as_asked": …}``."""
    rows = _tasks(config, _source(config, "val"), config.eval.tasks)
    async with serve_model(config, folder, progress, name) as (collector, processes):
        success = {}
        kinds: list[Kind] = list(TEMPERATURES) if config.agent_model is None else ["as_asked"]
        for kind in kinds:
            rollouts = await processes.beside(
                run_held_out(
                    collector,
                    rows,
                    step=0,
                    kind=kind,
                    max_tokens=config.model.max_tokens,
                    retry=RetryPolicy(max_attempts=1, timeout_s=config.agent.timeout_s),
                    on_progress=partial(progress.phase, f"evaluate {kind}"),
                )
            )
            success[kind] = summarize(rollouts)["reward_mean"]
            progress.evaluated(0, kind, success[kind])
    return {str(kind): value for kind, value in success.items()}


async def check_agent(config: Config, folder: RunFolder, progress: Progress, tasks: int) -> CheckResult:
    """One rollout on the first training task, then the base success over the first `tasks` ones."""
    source = _source(config, "train")
    if config.agent_model is None and config.optimize is None:
        algorithms_of(config)  # what would stop training stops the check
    rows = _tasks(config, source, tasks)
    async with serve_model(config, folder, progress, CHECK) as (collector, processes):
        new = rollouts_of(config, folder.run_id, rows, mode="eval", group=CHECK, replicas=1, max_attempts=1)
        (first,) = await processes.beside(collector.collect(new[:1]))
        rollouts = [first]
        if first.state == "succeeded" and len(rows) > 1:
            rollouts += await processes.beside(collector.collect(new[1:], partial(progress.phase, "base success")))
        earned = [rollout.reward or 0.0 for rollout in rollouts]
        checked = CheckResult(
            rollout=first,
            attempts=await processes.store.attempts([first.id]),
            calls=await processes.store.calls([first.id]),
            rewards=await processes.store.rewards([first.id]),
            feedback=(await read_feedback(processes.store, [first]))[0],
            success=sum(earned) / len(earned),
            tasks=len(earned),
            spread=max(earned) - min(earned),
            trains=config.agent_model is None,
        )
    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordResult:
    """Counts of the recorded rollouts."""

    run_id: str
    rollouts: int
    succeeded: int
    reward: float
    """Mean final reward of those that have one; 0 where none has."""


async def record_rollouts(
    config: Config, folder: RunFolder, progress: Progress, per_task: int, most_tasks: int | None = None
) -> RecordResult:
    """Run the agent `per_task` times on each training task, on the first `most_tasks` of them.

    Raises NoCallsError where no rollout reached the gateway.
    """
    rows, attempts = _tasks(config, _source(config, "train"), most_tasks), config.agent.max_attempts
    new = rollouts_of(
        config, folder.run_id, rows, mode="train", group="record", replicas=per_task, max_attempts=attempts
    )
    async with serve_model(config, folder, progress, f"record {config.data.train}") as (collector, processes):
        rollouts = await processes.beside(collector.collect(new, partial(progress.phase, "record")))
        silence = check_calls_recorded(rollouts)
        if silence is not None:
            progress.note(silence)
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return RecordResult(
        run_id=folder.run_id,
        rollouts=len(rollouts),
        succeeded=sum(rollout.state == "succeeded" for rollout in rollouts),
        reward=statistics.fmean(rewards) if rewards else 0.0,
    )
