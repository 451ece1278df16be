"""Serving: a run whose model is served as it is and not trained.

The check, the evaluation and the recording of rollouts use it, each with a run of its own; forks of a finished run are
executed in that run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from agentlightning.config.run import Config, run_record
from agentlightning.errors import ConflictError
from agentlightning.records import JSON, Mode, NewRollout, RetryPolicy, Rollout, Run, Sampling
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import find_run
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.monitor.senders import TraceExport
from agentlightning.trainer.policies import publish
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import RolloutCollector

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
    config: Config, folder: RunFolder, progress: Progress, name: str, beside: Processes | None = None
) -> AsyncIterator[tuple[RolloutCollector, Processes]]:
    """Makes the run, serves the model's weights as they are, and starts the workers; the run ends with the block.

    beside: the processes of another such block, whose server serves this run, too.
    """

    async def register(store: LightningStore) -> None:
        await store.create_run(name, run_record(config), folder.run_id)

    started = Processes(config, folder, register=register, progress=progress, beside=beside, learns=False)
    async with started as processes:
        async with _at_work(config, folder, processes, progress, step=0) as collector:
            yield collector, processes
        await processes.store.update_run(folder.run_id, state="finished")


async def execute_waiting(config: Config, folder: RunFolder, progress: Progress, step: int) -> list[Rollout]:
    """Execute the rollouts that wait in a finished run, by the weights that `config` names, which are those of `step`.

    Returns them, finished. The run stays finished, whatever happens.

    ConflictError where the run is not finished, or where another process works on it.
    """
    with folder.held():
        # A folder of its own, since the run's holds what a later training would go on with.
        own = RunFolder(folder.path / "executions", folder.run_id)
        async with Processes(config, own, progress=progress, learns=False) as processes:
            run = await find_run(processes.store, folder.run_id)
            if run.state != "finished":
                raise ConflictError(f"{run.id}: expected a finished run, this is {run.state}")
            async with _at_work(config, own, processes, progress, step) as collector:
                await collector.begin()
                query = RolloutQuery(run_id=run.id, states=["queued", "running"])
                waiting = await processes.store.rollouts(query)
                return await processes.beside(collector.finished(waiting, partial(progress.phase, "execute")))


@asynccontextmanager
async def _at_work(
    config: Config, folder: RunFolder, processes: Processes, progress: Progress, step: int
) -> AsyncIterator[RolloutCollector]:
    """The policies are served and the workers execute what is enqueued."""
    store = processes.store
    await publish(store, processes.engine, folder.run_id, processes.policies, step=step, parent=None)
    await processes.start_workers(progress.note)
    async with TraceExport(config.tracing.export, folder, store, progress.note):
        yield RolloutCollector(store, folder.run_id)
