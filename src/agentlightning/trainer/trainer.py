"""Trainer: puts a run together, starts its processes, runs the loop and takes everything down again.

`Trainer` is what a user calls, `Training` what it and the command line drive: one configured run. The process is also the
supervisor of the others: the server (gateway and store), the sampler, the learner and the workers are its children. It loads
neither torch nor a web server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.recorded import Recorded
from agentlightning.config import DEFAULT_STORE, Config, parse_config, run_record, without_password
from agentlightning.engines.base import DEFAULT_POLICY
from agentlightning.errors import AgentLightningError, ConfigError, NotFoundError
from agentlightning.runner.user_code import agent_spec
from agentlightning.store.base import LightningStore
from agentlightning.trainer.air import check_air
from agentlightning.trainer.checkpoint import RunFolder, checkpoint_folders, last_checkpoint
from agentlightning.trainer.collect import Collector
from agentlightning.trainer.curve import draw_curve
from agentlightning.trainer.dataset import Dataset, context_of
from agentlightning.trainer.ending import recorded_ending
from agentlightning.trainer.evidence import check_evidence
from agentlightning.trainer.export import TraceExport
from agentlightning.trainer.learning import check_fit
from agentlightning.trainer.offline import OfflineLoop
from agentlightning.trainer.policies import Trained, check_groups, of_policy, policy_configs
from agentlightning.trainer.processes import Needs, Processes, engine_support
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.recorded import RECORDED, check_recorded, recorded_algorithm
from agentlightning.trainer.rl import Loop
from agentlightning.trainer.tasks import Source, load_tasks
from agentlightning.trainer.trackers import check_trackers
from agentlightning.trainer.upstreams import put_upstreams
from agentlightning.trainer.watch import Trackers
from agentlightning.types import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What training left behind."""

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


class Trainer:
    """Trains the model behind an agent.

    >>> trainer = Trainer(model="Qwen/Qwen2.5-1.5B-Instruct", algorithm=LightningRL(group_size=8), steps=100)
    >>> result = trainer.fit(solve, train=train_rows, val=val_rows)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        algorithm: LightningRL | Recorded | None = None,
        policies: Mapping[str, Mapping[str, Any]] | None = None,
        store: str | None = None,
        engine: Literal["local"] = "local",
        workers: int = 2,
        steps: int = 100,
        tasks_per_step: int = 32,
        learning_rate: float = 1e-5,
        seed: int = 0,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        runs: str | Path = "runs",
        server: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Args:
        model: hub name or local folder of a transformers causal language model with a chat template; None where each
            of `policies` has its own.
        algorithm: LightningRL by default; SFT, RFT, Distill, DPO and KTO learn from the record (`fit(from_run=…)`).
        policies: several to train at once, by the model name that agents ask for: what differs from the run's settings,
            as in ``[policies.NAME]``: ``{"writer": {"learning_rate": 2e-5, "algorithm": LightningRL(entropy=0.01)}}``.
        store: URL of the store; None: AGL_STORE, else ``sqlite:///runs/agl.db``.
        engine: where the weights live; the only one so far.
        workers: worker processes to start here; 0 where they run elsewhere.
        steps, tasks_per_step, learning_rate, seed: as in the table ``[trainer]``.
        settings: any other setting by table, as in TOML: ``{"trainer": {"grad_clip": 0.5}, "eval": {"every": 10}}``.
        runs: folder under which every run gets its own.
        server: URL of a server that runs already, with its store (its key in AGL_SERVER_KEY); None starts one.
        progress: told of phases, steps and evaluations as they come; None: nobody is.

        ConfigError where both `store` and `server` are given; settings are checked by `fit`.
        """
        if store is not None and server is not None:
            raise ConfigError("server: has a store of its own; give store or server, not both")
        algorithm = algorithm or LightningRL()
        table: dict[str, dict[str, Any]] = {
            "model": {} if model is None else {"path": model},
            "agent": {"workers": workers},
            "algorithm": _algorithm_table(algorithm),
            "trainer": {
                "steps": steps,
                "tasks_per_step": tasks_per_step,
                "learning_rate": learning_rate,
                "seed": seed,
            },
            "engine": {"name": engine},
            "store": {"url": server or store or default_store()},
        }
        if policies:
            table["policies"] = {alias: _policy_table(own) for alias, own in policies.items()}
        for name, values in (settings or {}).items():
            table[name] = {**table.get(name, {}), **values}
        self._table = table
        self._runs = Path(runs)
        self._progress = progress or Silent()
        self._training: Training | None = None

    def fit(
        self,
        agent: Callable[..., Any] | str | None = None,
        train: Source | None = None,
        val: Source | None = None,
        reward: Callable[..., Any] | str | None = None,
        *,
        from_run: str | Sequence[str] | None = None,
    ) -> Result:
        """Train until the last step and return. Works in scripts and notebooks: the loop runs in a thread of its own.

        Args:
            agent: a callable ``(task, llm) -> reward``, sync or async, or ``file.py:name``.
            train: task rows, or a source as in `load_tasks`.
            val: held-out task rows, never trained on.
            reward: ``(task, result) -> float | dict``, as docs/rewards.md says; None: the agent's return value. A program or
                a judge: ``settings={"agent": {"reward": {"command": …}}}``.
            from_run: ids of runs in the same store whose rollouts are learned from, in place of `train`; the agent is then
                needed for `val` alone.

        Ctrl-C ends training after the step that is under way; a second Ctrl-C ends it at once, with KeyboardInterrupt.
        Raises the errors of docs/errors.md: an InputError before anything starts, the others where the run cannot go on.
        """
        training = self._prepare(agent, train, val, reward, from_run)
        outcome: Future[Result] = Future()

        def work() -> None:
            try:
                outcome.set_result(asyncio.run(training.run()))
            except BaseException as error:  # told where `fit` was called
                outcome.set_exception(error)

        thread = threading.Thread(target=work, name="trainer")
        thread.start()
        asked = 0
        while not outcome.done():
            try:
                wait([outcome])
            except KeyboardInterrupt:
                asked += 1
                if asked > 2:
                    raise
                (training.stop if asked == 1 else training.cancel)()
        thread.join()
        try:
            return outcome.result()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def afit(
        self,
        agent: Callable[..., Any] | str | None = None,
        train: Source | None = None,
        val: Source | None = None,
        reward: Callable[..., Any] | str | None = None,
        *,
        from_run: str | Sequence[str] | None = None,
    ) -> Result:
        """`fit` as a coroutine."""
        return await self._prepare(agent, train, val, reward, from_run).run()

    def stop(self) -> None:
        """Ask the run to end after the step that is under way, with a checkpoint."""
        if self._training is not None:
            self._training.stop()

    def _prepare(
        self,
        agent: Callable[..., Any] | str | None,
        train: Source | None,
        val: Source | None,
        reward: Callable[..., Any] | str | None,
        from_run: str | Sequence[str] | None,
    ) -> Training:
        folder = RunFolder(self._runs, new_run_id())
        folder.make()

        def code(function: Callable[..., Any] | str) -> str:
            return function if isinstance(function, str) else agent_spec(function, folder.path)

        def source(tasks: Source, name: str) -> str:
            if isinstance(tasks, str):
                return tasks
            return folder.write_tasks(name, load_tasks(tasks, seed=self._table["trainer"]["seed"]))

        table = {name: dict(values) for name, values in self._table.items()}
        if agent is not None:
            table["agent"]["run"] = code(agent)
        else:
            del table["agent"]["workers"]
        if reward is not None:
            table["agent"]["reward"] = code(reward)
        data = table.setdefault("data", {})
        if train is not None:
            data["train"] = source(train, "train.jsonl")
        if from_run is not None:
            data["from_run"] = from_run
        if val is not None:
            data["val"] = source(val, "val.jsonl")
        self._training = Training(parse_config(table, "Trainer"), folder, self._progress)
        return self._training


class Training:
    """One configured run, trained from its start or from its last checkpoint to its end."""

    def __init__(self, config: Config, folder: RunFolder, progress: Progress | None = None) -> None:
        self._config = config
        self._folder = folder
        self._progress = progress or Silent()
        self._stopping = False
        self._loop: Loop | OfflineLoop | None = None
        self._cancel: Callable[[], object] = lambda: None

    def stop(self) -> None:
        """Ask the run to end after the step that is under way, with a checkpoint. From any thread."""
        self._stopping = True
        if self._loop is not None:
            self._loop.stopping = True

    def cancel(self) -> None:
        """End `run` at once, with CancelledError; the last checkpoint stays. From any thread."""
        with contextlib.suppress(RuntimeError):  # it has just ended by itself
            self._cancel()

    async def run(self, *, resume: bool = False, name: str = "") -> Result:
        """Train as configured; with `resume`, go on from the run's last checkpoint."""
        config, folder, task = self._config, self._folder, asyncio.current_task()
        if task is not None:
            self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        seed = config.trainer.seed
        val = load_tasks(config.data.val, config.data.fields, seed)[: config.eval.tasks] if config.data.val else []
        if config.data.from_run:
            return await self._run_recorded(val, resume, name)
        assert config.data.train is not None  # a configuration has one of the two
        configs = policy_configs(config)
        algorithms = algorithms_of(config)
        train = load_tasks(config.data.train, config.data.fields, seed)
        needs = {
            alias: Needs(reference=one.needs_reference, critic_learning_rate=one.critic_learning_rate)
            for alias, one in algorithms.items()
        }
        processes = Processes(config, folder, needs=needs)

        def make_loop() -> Loop:
            return Loop(
                config=config,
                policies={
                    alias: Trained(config=configs[alias], algorithm=one, value=processes.policies[alias])
                    for alias, one in algorithms.items()
                },
                run_id=folder.run_id,
                folder=folder,
                store=processes.store,
                engine=processes.engine,
                collector=Collector(processes.store, folder.run_id),
                train=train,
                val=val,
                progress=self._progress,
            )

        return await self._run_beside(processes, make_loop, resume, name)

    async def _run_recorded(self, val: list[JSON], resume: bool, name: str) -> Result:
        """Learn from the record of other runs."""
        config, folder = self._config, self._folder
        algorithm = recorded_algorithm(config)
        check_recorded(algorithm, engine_support(config, reference=algorithm.needs_reference))
        processes = Processes(config, folder, needs={DEFAULT_POLICY: Needs(reference=algorithm.needs_reference)})

        def make_loop() -> OfflineLoop:
            model = Path(processes.policy["tokenizer"])
            dataset = Dataset(
                algorithm=algorithm,
                store=processes.store,
                sources=config.data.from_run,
                folder=folder,
                tokenizer=model,
                longest=context_of(model, algorithm.longest),
                note=self._progress.note,
            )
            return OfflineLoop(
                config=config,
                algorithm=algorithm,
                run_id=folder.run_id,
                folder=folder,
                store=processes.store,
                engine=processes.engine,
                collector=Collector(processes.store, folder.run_id),
                policy=processes.policy,
                dataset=dataset,
                val=val,
                progress=self._progress,
            )

        return await self._run_beside(processes, make_loop, resume, name)

    async def _run_beside(
        self, processes: Processes, make_loop: Callable[[], Loop | OfflineLoop], resume: bool, name: str
    ) -> Result:
        """Start the processes, run the loop beside them, take them down again."""
        config, folder = self._config, self._folder
        check_trackers(config.trainer.trackers)
        with folder.held():
            folder.create(config)
            trackers = Trackers(folder, config.trainer.trackers, self._progress.note)
            async with trackers, processes:
                await self._enter(processes.store, resume, name)
                async with recorded_ending(processes.store, folder.run_id):
                    await put_upstreams(config, folder.run_id, processes.store)
                    loop = self._loop = make_loop()
                    loop.stopping = self._stopping
                    loop.watch.on_row = trackers.poke
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

    async def _leave(self, store: LightningStore, step: int) -> Result:
        folder = self._folder
        finished = step == self._config.trainer.steps
        run = await store.update_run(folder.run_id, state="finished" if finished else "interrupted")
        checkpoint = await last_checkpoint(store, folder.run_id)
        assert checkpoint is not None  # the loop makes one before its first step
        rows = folder.metrics()
        try:
            draw_curve(rows, run.name, folder.path / "curve.png")
        except (AgentLightningError, OSError) as error:
            self._progress.note(f"the curve was not drawn: {error}")
        return Result(
            run_id=folder.run_id,
            folder=folder.path,
            policy=Path(checkpoint.path),
            policies=checkpoint_folders(Path(checkpoint.path), list(policy_configs(self._config))),
            step=step,
            finished=finished,
            metrics=rows,
        )


def _algorithm_table(algorithm: LightningRL | Recorded) -> dict[str, Any]:
    named = {"name": algorithm.name} if isinstance(algorithm, Recorded) else {}
    return named | dataclasses.asdict(algorithm)


def _policy_table(own: Mapping[str, Any]) -> dict[str, Any]:
    algorithm = own.get("algorithm")
    return {**own, "algorithm": _algorithm_table(algorithm)} if isinstance(algorithm, LightningRL) else dict(own)


def _name(config: Config) -> str:
    """What a list of runs calls one that was given no name."""
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
        hint = "; it learns from recorded rollouts: name their run with data.from_run" if name in RECORDED else ""
        raise ConfigError(f"algorithm.name: {name!r} is not for data.train, expected lightning_rl{hint}")
    known = [field.name for field in dataclasses.fields(LightningRL)]
    for setting in table:
        if setting not in known:
            raise ConfigError(f"algorithm.{setting}: no such setting; known here: {', '.join(known)}")
    algorithm = LightningRL(**table)
    check_evidence(algorithm)
    return algorithm


def default_store() -> str:
    """AGL_STORE, else a SQLite file under runs/."""
    return os.environ.get("AGL_STORE") or DEFAULT_STORE


def new_run_id() -> str:
    """A readable id that sorts by time: 20261120-174501-3f9a."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid4().hex[:4]}"
