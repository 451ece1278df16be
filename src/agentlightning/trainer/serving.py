"""Serving: a run whose model is served as it is and not trained.

The check, the evaluation and the recording of rollouts use it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentlightning.config import Config, run_record
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.collect import RolloutCollector
from agentlightning.trainer.monitor.trace_export import TraceExport
from agentlightning.trainer.policies import publish
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.progress import Progress
from agentlightning.types import JSON, Mode, NewRollout, RetryPolicy, Run, Sampling

CHECK = "check"
"""The name of a check's run, which lists leave out."""
OPTIMIZE = "optimize"
"""First word of the names of runs that search for prompts."""
PURPOSES = (CHECK, "eval", "record", "verl", OPTIMIZE, "optimizer", "serve")
"""First words of the names of runs that train nothing; `optimizer` runs keep what the model of a search was asked."""


def is_training(run: Run) -> bool:
    """False for a run that trains nothing: ``agl train`` cannot resume it."""
    return run.name.partition(" ")[0] not in PURPOSES


def is_search(run: Run) -> bool:
    """True for a run that searches for prompts, which ``agl optimize`` resumes."""
    return run.name.partition(" ")[0] == OPTIMIZE


def rollouts_of(
    config: Config, run_id: str, rows: Sequence[JSON], *, mode: Mode, group: str, replicas: int, max_attempts: int
) -> list[NewRollout]:
    """Rollouts of these tasks as training would sample them, `replicas` of each."""
    return [
        NewRollout(
            run_id=run_id,
            task=row,
            group_id=f"{group}:{position}",
            replica=replica,
            mode=mode,
            sampling=Sampling(temperature=config.model.temperature, max_tokens=config.model.max_tokens),
            retry=RetryPolicy(max_attempts=max_attempts, timeout_s=config.agent.timeout_s),
        )
        for position, row in enumerate(rows)
        for replica in range(replicas)
    ]


@asynccontextmanager
async def serve_model(
    config: Config, folder: RunFolder, progress: Progress, name: str
) -> AsyncIterator[tuple[RolloutCollector, Processes]]:
    """Makes the run, serves the model's weights as they are, and starts the workers; the run ends with the block."""

    async def register(store: LightningStore) -> None:
        await store.create_run(name, run_record(config), folder.run_id)

    async with Processes(config, folder, register=register, progress=progress) as processes:
        store = processes.store
        await publish(store, processes.engine, folder.run_id, processes.policies, step=0, parent=None)
        await processes.start_workers(progress.note)
        async with TraceExport(config.tracing.export, folder, store, progress.note):
            yield RolloutCollector(store, folder.run_id), processes
        await store.update_run(folder.run_id, state="finished")
