"""Training: one configured run, its processes put together, run beside the loop, and taken down again.

`Trainer` and the command line drive it. The process is also the supervisor of the others: the server (gateway and store),
the sampler, the learner and the workers are its children. It loads neither torch nor a web server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from agentlightning.algorithms.offline import OfflineAlgorithm
from agentlightning.config.external import secret_variables
from agentlightning.config.run import Config
from agentlightning.engines.base import DEFAULT_POLICY, EngineNeeds
from agentlightning.engines.folders import max_row_tokens
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.records import JSON
from agentlightning.store.base import LightningStore
from agentlightning.trainer.agent_source import alarm_warning
from agentlightning.trainer.checkpoint import Fingerprint, RunFolder, checkpoint_folders, take_fingerprint
from agentlightning.trainer.checkpoint_files import check_checkpoint_url, last_checkpoint
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.defaults import with_defaults
from agentlightning.trainer.display import draw_curve
from agentlightning.trainer.environments import with_environment
from agentlightning.trainer.loop import RLLoop
from agentlightning.trainer.monitor.health_checks import HEALTH_CHECKS, OFFLINE_HEALTH_CHECKS
from agentlightning.trainer.monitor.metric_logger import LoadWatch, MetricLogger
from agentlightning.trainer.monitor.senders import AlertSender, TraceExport
from agentlightning.trainer.monitor.trackers import TrackerProcesses, check_trackers
from agentlightning.trainer.offline import EXAMPLES, OfflineDataset, OfflineLoop
from agentlightning.trainer.policies import (
    Opponents,
    TrainedPolicy,
    policy_configs,
)
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.run_lease import RunSession
from agentlightning.trainer.scheduler import RolloutCollector
from agentlightning.trainer.schedules import (
    needs_of,
    offline_algorithm,
    online_algorithms,
    schedules_of,
)

MakeLoop = Callable[[Processes, MetricLogger], RLLoop | OfflineLoop]


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


class Training(RunSession[TrainResult]):
    """One configured run, trained from its start or from its last checkpoint to its end."""

    command = "train"

    def __init__(
        self, config: Config, folder: RunFolder, progress: Progress | None = None, *, console: bool = False
    ) -> None:
        """console: also start the web console, and tell its URL."""
        super().__init__(config, folder, progress or Silent())
        self._console = console
        self._loop: RLLoop | OfflineLoop | None = None
        self._made_of = Fingerprint()

    def stop(self) -> None:
        """Ask the run to end after the step that is under way, with a checkpoint. From any thread."""
        self._stopping = True
        if self._loop is not None:
            self._loop.stopping = True
        self._progress.note("ending after this step, with a checkpoint; Ctrl-C again ends at once")

    def _stopped(self, result: TrainResult) -> str:
        return f"stopped after step {result.step}"

    async def _work(self, resume: bool, name: str) -> TrainResult:
        if self._config.agent_model is not None:
            raise ConfigError(
                f"model.path: expected a model that can be trained, got {self._config.model.path!r}; agl optimize searches "
                "for prompts over an external model, and agl check, agl eval and agl prompts test take one, too"
            )
        check_checkpoint_url(self._config.trainer)
        self._config = await with_environment(self._config, self._folder, self._progress)
        self._check_algorithms()
        self._progress.phase("starting: model", 0, 3)
        self._config = await with_defaults(self._config, self._progress.note)
        if (sentence := alarm_warning(self._config.agent.run)) is not None:
            self._progress.note(sentence)
        data, seed = self._config.data, self._config.trainer.seed
        val = load_tasks(data.val, seed)[: self._config.eval.tasks] if data.val else []
        needs, make_loop = self._offline(val) if self._config.offline else self._online(val)
        if self._config.offline:
            self._made_of = take_fingerprint(self._config, [])
        config, folder, trackers = self._config, self._folder, self._config.trainer.trackers
        name, summary = name or _name(self._config), self._made_of.summary()
        register = partial(self._enter, resume=resume, name=name, summary=summary)
        processes = Processes(
            config, folder, needs=needs, register=register, progress=self._progress, console=self._console
        )
        check_trackers(trackers)
        withhold, note = secret_variables(config.model_dump()), self._progress.note
        async with (
            aclosing(self._lease),
            processes,
            TrackerProcesses(folder, trackers, note, withhold) as sending,
            AlertSender(config.alerts, folder.run_id, note, withhold) as alerts,
        ):
            logger = MetricLogger(
                run_id=folder.run_id,
                folder=folder,
                store=processes.store,
                progress=self._progress,
                rules=OFFLINE_HEALTH_CHECKS if config.offline else HEALTH_CHECKS,
                on_row=sending.poke,
                on_alarm=alerts.put,
            )
            loop = self._loop = make_loop(processes, logger)
            loop.stopping = self._stopping
            if config.agent.given:
                await processes.start_workers(note)
            async with (
                TraceExport(config.tracing.export, folder, processes.store, note),
                LoadWatch(store=processes.store, logger=logger),
            ):
                step = await processes.beside(self._lease.during(loop.run(resume)))
            result = await self._leave(processes.store, step)
            sending.state = "finished" if result.finished else "interrupted"
            return result

    def _check_algorithms(self) -> None:
        """ConfigError before a model is looked for."""
        if self._config.offline:
            offline_algorithm(self._config)
        else:
            schedules_of(self._config)

    def _online(self, val: list[JSON]) -> tuple[dict[str, EngineNeeds], MakeLoop]:
        """Training on the run's own rollouts."""
        assert self._config.data.train is not None  # a configuration has one of the two
        train = load_tasks(self._config.data.train, self._config.trainer.seed)
        self._config.check_tasks(train)
        self._made_of = take_fingerprint(self._config, train)
        self._config = self._config.with_steps(len(train))
        configs, schedules = policy_configs(self._config), schedules_of(self._config)

        def make_loop(processes: Processes, logger: MetricLogger) -> RLLoop:
            policies = {
                alias: TrainedPolicy(
                    config=configs[alias],
                    algorithm=online_algorithms(schedule)[0],
                    value=processes.policies[alias],
                    schedule=schedule,
                )
                for alias, schedule in schedules.items()
            }
            return RLLoop(
                policies=policies,
                train=train,
                reports_numbers=processes.engine.support.token_numbers,
                opponents=self._opponents(processes, list(policies)),
                offline={
                    number: self._offline_loop(
                        processes, logger, part.algorithm, part.config, f"examples-{number}.jsonl"
                    )
                    for schedule in schedules.values()
                    for number, part in enumerate(schedule)
                    if isinstance(part.algorithm, OfflineAlgorithm)
                },
                **self._shared(processes, logger, val),
            )

        return {alias: needs_of(schedule) for alias, schedule in schedules.items()}, make_loop

    def _opponents(self, processes: Processes, trained: list[str]) -> Opponents | None:
        settings = {alias: own for alias, own in self._config.policies.items() if not own.trains}
        if not settings:
            return None
        return Opponents(
            settings=settings,
            values={alias: processes.policies[alias] for alias in settings},
            trained=trained,
            seed=self._config.trainer.seed,
            folder=self._folder,
            store=processes.store,
            engine=processes.engine,
        )

    def _offline(self, val: list[JSON]) -> tuple[dict[str, EngineNeeds], MakeLoop]:
        """Offline training on the rollouts of other runs."""
        algorithm = offline_algorithm(self._config)

        def make_loop(processes: Processes, logger: MetricLogger) -> OfflineLoop:
            return self._offline_loop(processes, logger, algorithm, self._config, EXAMPLES, val)

        return {DEFAULT_POLICY: EngineNeeds(reference=algorithm.needs_reference)}, make_loop

    def _offline_loop(
        self,
        processes: Processes,
        logger: MetricLogger,
        algorithm: OfflineAlgorithm,
        config: Config,
        examples: str,
        val: Sequence[JSON] = (),
    ) -> OfflineLoop:
        """The loop of an offline run, or of a part of a schedule, beside a loop that evaluates and saves."""
        dataset = OfflineDataset(
            algorithm=algorithm,
            store=processes.store,
            sources=self._config.data.from_run,
            folder=self._folder,
            tokenizer=processes.model,
            longest=max_row_tokens(processes.model),
            note=self._progress.note,
            file=examples,
        )
        shared = self._shared(processes, logger, val) | {"config": config}
        return OfflineLoop(algorithm=algorithm, policy=processes.policy, dataset=dataset, **shared)

    def _shared(self, processes: Processes, logger: MetricLogger, val: Sequence[JSON]) -> dict[str, Any]:
        """Keywords that both loops take."""
        return {
            "config": self._config,
            "run_id": self._folder.run_id,
            "folder": self._folder,
            "store": processes.store,
            "engine": processes.engine,
            "collector": RolloutCollector(processes.store, self._folder.run_id),
            "val": val,
            "progress": self._progress,
            "metric_logger": logger,
            "hung_processes": processes.hung,
            "made_of": self._made_of,
        }

    async def _leave(self, store: LightningStore, step: int) -> TrainResult:
        folder = self._folder
        assert self._loop is not None
        finished = step == self._loop.config.trainer.steps
        run = await store.update_run(folder.run_id, state="finished" if finished else "interrupted")
        checkpoint = await last_checkpoint(store, folder)
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


def _name(config: Config) -> str:
    """Name of a run that was given none, as lists of runs show it."""
    if config.offline:
        return f"{config.algorithm['type']} from {', '.join(config.data.from_run)}"
    return config.source_name


def new_run_id() -> str:
    """A readable id that sorts by time: 20261120-174501-3f9a."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid4().hex[:4]}"
