"""Training: one configured run, its processes put together, run beside the loop, and taken down again.

`Trainer` and the command line drive it. The process is also the supervisor of the others: the server (gateway and store),
the sampler, the learner and the workers are its children. It loads neither torch nor a web server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.offline import OfflineAlgorithm
from agentlightning.config import DEFAULT_STORE, Config, run_record, without_password
from agentlightning.engines.base import DEFAULT_POLICY
from agentlightning.errors import AgentLightningError, ConfigError, ConflictError, InputError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RunFolder, checkpoint_folders, last_checkpoint
from agentlightning.trainer.collect import RolloutCollector
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.external_models import put_external_models
from agentlightning.trainer.monitor.curve import draw_curve
from agentlightning.trainer.monitor.metric_logger import TrackerProcesses
from agentlightning.trainer.monitor.trace_export import TraceExport
from agentlightning.trainer.monitor.trackers import check_trackers
from agentlightning.trainer.offline.dataset import OfflineDataset, max_row_tokens
from agentlightning.trainer.offline.loop import OfflineLoop
from agentlightning.trainer.offline.settings import OFFLINE_ALGORITHMS, check_offline, offline_algorithm
from agentlightning.trainer.policies import TrainedPolicy, check_groups, of_policy, policy_configs
from agentlightning.trainer.processes import Needs, Processes, engine_support
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.rl.air_metrics import check_air
from agentlightning.trainer.rl.credit_inputs import check_credit_inputs
from agentlightning.trainer.rl.loop import RLLoop
from agentlightning.trainer.rl.policy_update import check_fit
from agentlightning.types import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of a training run."""

    run_id: str
    folder: Path
    policy: Path
    """Checkpoint folder of the last step; transformers loads it. Of several policies, the folder with theirs."""
    policies: dict[str, Path]
    """By alias, each policy's own; one alone is `default`."""
    step: int
    finished: bool
    """False where it was stopped before the last step."""
    metrics: list[JSON]
    """Rows of metrics.jsonl."""


class Training:
    """One configured run, trained from its start or from its last checkpoint to its end."""

    def __init__(self, config: Config, folder: RunFolder, progress: Progress | None = None) -> None:
        self._config = config
        self._folder = folder
        self._progress = progress or Silent()
        self._stopping = False
        self._loop: RLLoop | OfflineLoop | None = None
        self._cancel: Callable[[], object] = lambda: None

    def stop(self) -> None:
        """Ask the run to end after the step that is under way, with a checkpoint. From any thread."""
        self._progress.note("ending after this step, with a checkpoint; Ctrl-C again ends at once")
        self._stopping = True
        if self._loop is not None:
            self._loop.stopping = True

    def cancel(self) -> None:
        """End `run` at once, with CancelledError; the last checkpoint stays. From any thread."""
        with contextlib.suppress(RuntimeError):  # it has just ended by itself
            self._cancel()

    async def run(self, *, resume: bool = False, name: str = "") -> TrainResult:
        """Train as configured; with `resume`, go on from the run's last checkpoint. Says how to resume what did not end."""
        lasting = self._config.store.url != "memory://"
        try:
            result = await self._train(resume, name)
        except (ConflictError, NotFoundError):
            raise
        except BaseException as error:
            learned, started = self._folder.has_checkpoint(), (self._folder.path / "config.json").exists()
            if lasting and (learned or (started and not isinstance(error, InputError))):
                kept = "what was learned is kept" if learned else "nothing was learned yet"
                self._progress.note(f"{kept}; go on with: {resume_line(self._folder.path)}")
            raise
        if not result.finished:
            on = f"go on with: {resume_line(result.folder)}" if lasting else "its store was in memory and is gone"
            self._progress.note(f"stopped after step {result.step}; {on}")
        return result

    async def _train(self, resume: bool, name: str) -> TrainResult:
        config, folder, task = self._config, self._folder, asyncio.current_task()
        if task is not None:
            self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        seed = config.trainer.seed
        val = load_tasks(config.data.val, config.data.fields, seed)[: config.eval.tasks] if config.data.val else []
        register = partial(self._enter, resume=resume, name=name)
        if config.data.from_run:
            return await self._run_recorded(val, resume, register)
        assert config.data.train is not None  # a configuration has one of the two
        train = load_tasks(config.data.train, config.data.fields, seed)
        config = self._config = config.with_steps(len(train))
        configs = policy_configs(config)
        algorithms = algorithms_of(config)
        needs = {
            alias: Needs(reference=one.needs_reference, critic_learning_rate=one.critic_learning_rate)
            for alias, one in algorithms.items()
        }
        processes = Processes(config, folder, needs=needs, register=register, progress=self._progress)

        def make_loop() -> RLLoop:
            return RLLoop(
                config=config,
                policies={
                    alias: TrainedPolicy(config=configs[alias], algorithm=one, value=processes.policies[alias])
                    for alias, one in algorithms.items()
                },
                run_id=folder.run_id,
                folder=folder,
                store=processes.store,
                engine=processes.engine,
                collector=RolloutCollector(processes.store, folder.run_id),
                train=train,
                val=val,
                progress=self._progress,
            )

        return await self._run_beside(processes, make_loop, resume)

    async def _run_recorded(
        self, val: list[JSON], resume: bool, register: Callable[[LightningStore], Awaitable[None]]
    ) -> TrainResult:
        """Offline training on the rollouts of other runs."""
        config, folder = self._config, self._folder
        algorithm = offline_algorithm(config)
        check_offline(algorithm, engine_support(config, reference=algorithm.needs_reference))
        needs = {DEFAULT_POLICY: Needs(reference=algorithm.needs_reference)}
        processes = Processes(config, folder, needs=needs, register=register, progress=self._progress)

        def make_loop() -> OfflineLoop:
            model = Path(processes.policy["tokenizer"])
            dataset = OfflineDataset(
                algorithm=algorithm,
                store=processes.store,
                sources=config.data.from_run,
                folder=folder,
                tokenizer=model,
                longest=max_row_tokens(model, algorithm.longest),
                note=self._progress.note,
            )
            return OfflineLoop(
                config=config,
                algorithm=algorithm,
                run_id=folder.run_id,
                folder=folder,
                store=processes.store,
                engine=processes.engine,
                collector=RolloutCollector(processes.store, folder.run_id),
                policy=processes.policy,
                dataset=dataset,
                val=val,
                progress=self._progress,
            )

        return await self._run_beside(processes, make_loop, resume)

    async def _run_beside(
        self, processes: Processes, make_loop: Callable[[], RLLoop | OfflineLoop], resume: bool
    ) -> TrainResult:
        """Start the processes, run the loop beside them, take them down again."""
        config, folder = self._config, self._folder
        check_trackers(config.trainer.trackers)
        trackers = TrackerProcesses(folder, config.trainer.trackers, self._progress.note)
        async with processes, trackers:
            await put_external_models(config, folder.run_id, processes.store)
            loop = self._loop = make_loop()
            loop.stopping = self._stopping
            loop.metric_logger.on_row = trackers.poke
            if config.agent.given:
                processes.start_workers(self._progress.note)
            async with TraceExport(config.tracing.export, folder, processes.store, self._progress.note):
                step = await processes.beside(loop.run(resume))
            result = await self._leave(processes.store, step)
            trackers.state = "finished" if result.finished else "interrupted"
            return result

    async def _enter(self, store: LightningStore, resume: bool, name: str) -> None:
        """The run as running in the store. A run that was killed before the store knew it is made when it is resumed."""
        run_id, url = self._folder.run_id, self._config.store.url
        if resume and await store.runs(ids=[run_id]):
            await store.update_run(run_id, state="running")
        elif resume and self._folder.has_checkpoint():
            why = "it ended with its process" if url == "memory://" else "name the one it was trained with: --store URL"
            raise NotFoundError(f"{run_id}: the store {without_password(url)} does not know this run; {why}")
        else:
            name = name or _name(self._config)
            await store.create_run(name, run_record(self._config), run_id)

    async def _leave(self, store: LightningStore, step: int) -> TrainResult:
        folder = self._folder
        assert self._loop is not None
        finished = step == self._loop.config.trainer.steps
        run = await store.update_run(folder.run_id, state="finished" if finished else "interrupted")
        checkpoint = await last_checkpoint(store, folder.run_id)
        assert checkpoint is not None  # the loop makes one before its first step
        rows = folder.metrics()
        try:
            draw_curve(rows, run.name, folder.path / "curve.png")
        except (AgentLightningError, OSError) as error:
            self._progress.note(f"the curve was not drawn: {error}")
        return TrainResult(
            run_id=folder.run_id,
            folder=folder.path,
            policy=Path(checkpoint.path),
            policies=checkpoint_folders(Path(checkpoint.path), list(policy_configs(self._config))),
            step=step,
            finished=finished,
            metrics=rows,
        )


def _algorithm_table(algorithm: LightningRL | OfflineAlgorithm) -> dict[str, Any]:
    named = {"name": algorithm.name} if isinstance(algorithm, OfflineAlgorithm) else {}
    return named | dataclasses.asdict(algorithm)


def _policy_table(own: Mapping[str, Any]) -> dict[str, Any]:
    algorithm = own.get("algorithm")
    return {**own, "algorithm": _algorithm_table(algorithm)} if isinstance(algorithm, LightningRL) else dict(own)


def _name(config: Config) -> str:
    """Name of a run that was given none, as lists of runs show it."""
    if config.data.from_run:
        return f"{config.algorithm['name']} from {', '.join(config.data.from_run)}"
    return Path(config.agent.run).name if config.agent.run is not None else str(config.agent.command)


def algorithms_of(config: Config) -> dict[str, LightningRL]:
    """The algorithm of each policy. ConfigError for a setting that is unknown, wrong, without effect, or too much for the
    configured engine."""
    algorithms = {}
    for alias, own in policy_configs(config).items():
        with of_policy(alias, config):
            algorithms[alias] = algorithm_of(own)
            check_fit(algorithms[alias], own)
    check_groups(algorithms)
    check_air(config, algorithms)
    return algorithms


def algorithm_of(config: Config) -> LightningRL:
    """The configured algorithm. ConfigError for an unknown name or setting."""
    table = dict(config.algorithm)
    name = table.pop("name", "lightning_rl")
    if name != "lightning_rl":
        hint = (
            "; it learns from recorded rollouts: name their run with data.from_run"
            if name in OFFLINE_ALGORITHMS
            else ""
        )
        raise ConfigError(f"algorithm.name: {name!r} is not for data.train, expected lightning_rl{hint}")
    known = [field.name for field in dataclasses.fields(LightningRL)]
    for setting in table:
        if setting not in known:
            raise ConfigError(f"algorithm.{setting}: no such setting; known here: {', '.join(known) or 'none'}")
    algorithm = LightningRL(**table)
    check_credit_inputs(algorithm)
    return algorithm


def resume_line(folder: Path) -> str:
    """The command that goes on with the run of this folder; `Trainer.fit` takes the id as `resume`."""
    runs = [] if folder.parent == Path("runs") else ["--runs", str(folder.parent)]
    return shlex.join(["agl", "train", "--resume", folder.name, *runs])


def default_store() -> str:
    """AGL_STORE, else a SQLite file under runs/."""
    return os.environ.get("AGL_STORE") or DEFAULT_STORE


def new_run_id() -> str:
    """A readable id that sorts by time: 20261120-174501-3f9a."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid4().hex[:4]}"
