"""Records an agent's rollouts without training on them: to look at them, or for offline training later.

Driven by ``agl record``. The rollouts are of mode train and nobody consumes them: `agl train --from-run` reads them as it
reads those of a training run.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial

from agentlightning.config.run import Config
from agentlightning.errors import ConfigError
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import check_calls_recorded
from agentlightning.trainer.serving import rollouts_of, serve_model


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
    if config.data.train is None:
        raise ConfigError("data.train: is required to record an agent; name training tasks")
    rows = load_tasks(config.data.train, config.trainer.seed)[:most_tasks]
    config.prompts.check_fields(rows[0], config.agent.command is not None)
    attempts = config.agent.max_attempts
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
