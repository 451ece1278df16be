"""Check and evaluate a model behind an agent without training it.

Driven by ``agl check``, ``agl eval`` and whoever wants a number before paying for more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from agentlightning.config import Config, run_record
from agentlightning.errors import ConfigError
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.collect import Collector
from agentlightning.trainer.ending import recorded_ending
from agentlightning.trainer.evaluate import TEMPERATURES, evaluate
from agentlightning.trainer.export import TraceExport
from agentlightning.trainer.policies import publish
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.tasks import load_tasks
from agentlightning.trainer.trainer import algorithms_of
from agentlightning.trainer.upstreams import put_upstreams
from agentlightning.types import JSON, Attempt, Call, NewRollout, RetryPolicy, Reward, Rollout, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What one rollout looked like, and how often the base model succeeds."""

    rollout: Rollout
    attempts: list[Attempt]
    calls: list[Call]
    rewards: list[Reward]
    success: float
    """Mean final reward at the training temperature over the first training tasks."""


async def evaluate_model(config: Config, folder: RunFolder, progress: Progress, name: str) -> dict[str, float]:
    """Held-out success of the configured model: ``{"greedy": …, "sampled": …}``."""
    if config.data.val is None:
        raise ConfigError("data.val: is required to evaluate; name held-out tasks")
    rows = load_tasks(config.data.val, config.data.fields, config.trainer.seed)[: config.eval.tasks]
    processes = Processes(config, folder)
    folder.create(config)
    async with processes, served(config, folder, processes, progress, name) as collector:
        success = {}
        for kind in TEMPERATURES:
            success[kind] = await processes.beside(
                evaluate(
                    collector,
                    folder.run_id,
                    rows,
                    step=0,
                    kind=kind,
                    max_tokens=config.model.max_tokens,
                    retry=_once(config),
                    on_progress=partial(progress.phase, f"evaluate {kind}"),
                )
            )
            progress.evaluated(0, kind, success[kind])
    return {str(kind): value for kind, value in success.items()}


async def check_agent(config: Config, folder: RunFolder, progress: Progress, tasks: int) -> Checked:
    """One rollout on the first training task, then the base success over the first `tasks` ones."""
    if config.data.train is None:
        raise ConfigError("data.train: is required to check an agent; name training tasks")
    algorithms_of(config)  # what would stop training stops the check
    rows = load_tasks(config.data.train, config.data.fields, config.trainer.seed)[:tasks]
    processes = Processes(config, folder)
    folder.create(config)
    async with processes, served(config, folder, processes, progress, "check") as collector:
        (first,) = await processes.beside(collector.collect(_rollouts(config, folder, rows[:1])))
        rollouts = [first]
        if first.state == "succeeded" and len(rows) > 1:
            rollouts += await processes.beside(
                collector.collect(
                    _rollouts(config, folder, rows)[1:],
                    lambda done, total: progress.phase("base success", done, total),
                )
            )
        checked = Checked(
            rollout=first,
            attempts=await processes.store.attempts([first.id]),
            calls=await processes.store.calls([first.id]),
            rewards=await processes.store.rewards([first.id]),
            success=sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts),
        )
    return checked


@asynccontextmanager
async def served(
    config: Config, folder: RunFolder, processes: Processes, progress: Progress, name: str
) -> AsyncIterator[Collector]:
    """Make the run, serve the model's weights as they are, start the workers; the run ends with the block."""
    store = processes.store
    await store.create_run(name, run_record(config), folder.run_id)
    async with recorded_ending(store, folder.run_id):
        await publish(store, processes.engine, folder.run_id, processes.policies, step=0, parent=None)
        await put_upstreams(config, folder.run_id, store)
        processes.start_workers(progress.note)
        async with TraceExport(config.tracing.export, folder, store, progress.note):
            yield Collector(store, folder.run_id)
        await store.update_run(folder.run_id, state="finished")


def _rollouts(config: Config, folder: RunFolder, rows: list[JSON]) -> list[NewRollout]:
    return [
        NewRollout(
            run_id=folder.run_id,
            task=row,
            group_id=f"check:{position}",
            mode="eval",
            sampling=Sampling(temperature=config.model.temperature, max_tokens=config.model.max_tokens),
            retry=_once(config),
        )
        for position, row in enumerate(rows)
    ]


def _once(config: Config) -> RetryPolicy:
    return RetryPolicy(max_attempts=1, timeout_s=config.agent.timeout_s)
