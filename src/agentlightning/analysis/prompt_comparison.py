"""Versions of a prompt template side by side: the same tasks, the same model, paired statistics and transcripts.

Driven by ``agl prompts test``. The versions run as evaluation rollouts of a run of their own, each pinned to its version, so
that nothing is trained on them. It decides nothing: whoever reads the numbers promotes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from agentlightning.analysis.paired_rollouts import PairedComparison, compare_columns
from agentlightning.config.run import Config
from agentlightning.errors import ConfigError
from agentlightning.records import Call, NewRollout, Resource, RetryPolicy, Rollout, Sampling
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import check_calls_recorded
from agentlightning.trainer.serving import serve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptComparison(PairedComparison):
    """The result of a test."""

    run_id: str
    """The run of its rollouts."""
    name: str


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
    rows = load_tasks(source, config.trainer.seed)[:tasks]
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
    return compared(folder.run_id, versions, rollouts, calls)


def compared(
    run_id: str,
    versions: Sequence[Resource],
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
) -> PromptComparison:
    """The result of finished rollouts: for each task one of each version, in their order."""
    columns = [rollouts[place :: len(versions)] for place in range(len(versions))]
    found = compare_columns([each.version for each in versions], columns, calls)
    return PromptComparison(
        run_id=run_id,
        name=versions[0].name,
        figures=found.figures,
        differences=found.differences,
        tasks=found.tasks,
    )
