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
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config import DEFAULT_STORE, Config, parse_config, run_record, without_password
from agentlightning.errors import AgentLightningError, ConfigError, NotFoundError
from agentlightning.runner.user_code import agent_spec
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RunFolder, last_checkpoint
from agentlightning.trainer.collect import Collector
from agentlightning.trainer.curve import draw_curve
from agentlightning.trainer.ending import recorded_ending
from agentlightning.trainer.evidence import check_evidence
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.rl import Loop
from agentlightning.trainer.tasks import Source, load_tasks
from agentlightning.trainer.upstreams import put_upstreams
from agentlightning.types import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What training left behind."""

    run_id: str
    folder: Path
    policy: Path
    """Checkpoint folder of the last step; transformers loads it."""
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
        model: str,
        *,
        algorithm: LightningRL | None = None,
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
        model: hub name or local folder of a transformers causal language model with a chat template.
        store: URL of the store; None: AGL_STORE, else ``sqlite:///runs/agl.db``.
        workers: worker processes to start here; 0 where they run elsewhere.
        settings: any other setting by table, as in TOML: ``{"trainer": {"grad_clip": 0.5}, "eval": {"every": 10}}``.
        runs: folder under which every run gets its own.
        server: URL of a server that runs already, with its store (its key in AGL_SERVER_KEY); None starts one.
        """
        if store is not None and server is not None:
            raise ConfigError("server: has a store of its own; give store or server, not both")
        algorithm = algorithm or LightningRL()
        table: dict[str, dict[str, Any]] = {
            "model": {"path": model},
            "agent": {"workers": workers},
            "algorithm": dataclasses.asdict(algorithm),
            "trainer": {
                "steps": steps,
                "tasks_per_step": tasks_per_step,
                "learning_rate": learning_rate,
                "seed": seed,
            },
            "engine": {"name": engine},
            "store": {"url": server or store or default_store()},
        }
        for name, values in (settings or {}).items():
            table[name] = {**table.get(name, {}), **values}
        self._table = table
        self._runs = Path(runs)
        self._progress = progress or Silent()
        self._training: Training | None = None

    def fit(
        self,
        agent: Callable[..., Any] | str,
        train: Source,
        val: Source | None = None,
        reward: Callable[..., float] | str | None = None,
    ) -> Result:
        """Train until the last step and return. Works in scripts and notebooks: the loop runs in a thread of its own.

        Args:
            agent: a callable ``(task, llm) -> reward``, sync or async, or ``file.py:name``.
            train: task rows, or a source as in `load_tasks`.
            val: held-out task rows, never trained on.
            reward: ``(task, result) -> reward``; None: the agent's return value.

        Ctrl-C ends training after the step that is under way; a second Ctrl-C ends it at once, with KeyboardInterrupt.
        """
        training = self._prepare(agent, train, val, reward)
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
        agent: Callable[..., Any] | str,
        train: Source,
        val: Source | None = None,
        reward: Callable[..., float] | str | None = None,
    ) -> Result:
        """`fit` as a coroutine."""
        return await self._prepare(agent, train, val, reward).run()

    def stop(self) -> None:
        """Ask the run to end after the step that is under way, with a checkpoint."""
        if self._training is not None:
            self._training.stop()

    def _prepare(
        self,
        agent: Callable[..., Any] | str,
        train: Source,
        val: Source | None,
        reward: Callable[..., float] | str | None,
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
        table["agent"]["run"] = code(agent)
        if reward is not None:
            table["agent"]["reward"] = code(reward)
        data = table.setdefault("data", {})
        data["train"] = source(train, "train.jsonl")
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
        self._loop: Loop | None = None
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
        algorithm = algorithm_of(config)
        seed = config.trainer.seed
        train = load_tasks(config.data.train, config.data.fields, seed)
        val = load_tasks(config.data.val, config.data.fields, seed)[: config.eval.tasks] if config.data.val else []
        processes = Processes(config, folder)
        with folder.held():
            folder.create(config)
            async with processes:
                await self._enter(processes.store, resume, name)
                async with recorded_ending(processes.store, folder.run_id):
                    await put_upstreams(config, folder.run_id, processes.store)
                    loop = self._loop = Loop(
                        config=config,
                        algorithm=algorithm,
                        run_id=folder.run_id,
                        folder=folder,
                        store=processes.store,
                        engine=processes.engine,
                        collector=Collector(processes.store, folder.run_id),
                        policy=processes.policy,
                        train=train,
                        val=val,
                        progress=self._progress,
                        stopping=self._stopping,
                    )
                    processes.start_workers(self._progress.note)
                    step = await processes.beside(loop.run(resume))
                    return await self._leave(processes.store, step)

    async def _enter(self, store: LightningStore, resume: bool, name: str) -> None:
        """The run as running in the store. A run that was killed before the store knew it is made when it is resumed."""
        run_id, url = self._folder.run_id, self._config.store.url
        if resume and await store.runs(ids=[run_id]):
            await store.update_run(run_id, state="running")
        elif resume and self._folder.has_checkpoint():
            why = "it ended with its process" if url == "memory://" else "name the one it was trained with: --store URL"
            raise NotFoundError(f"{run_id}: the store {without_password(url)} does not know this run; {why}")
        else:
            agent = self._config.agent
            name = name or (Path(agent.run).name if agent.run is not None else str(agent.command))
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
            step=step,
            finished=finished,
            metrics=rows,
        )


def algorithm_of(config: Config) -> LightningRL:
    """The configured algorithm. ConfigError for an unknown name or setting."""
    table = dict(config.algorithm)
    name = table.pop("name", "lightning_rl")
    if name != "lightning_rl":
        raise ConfigError(f"algorithm.name: {name!r} is not known; known: lightning_rl")
    known = [field.name for field in dataclasses.fields(LightningRL)]
    for setting in table:
        if setting not in known:
            raise ConfigError(f"algorithm.{setting}: no such setting; known here: {', '.join(known)}")
    algorithm = LightningRL(**table)
    check_evidence(algorithm)
    if algorithm.dynamic_sampling:
        raise ConfigError("algorithm.dynamic_sampling: the trainer cannot make up for groups yet; leave it false")
    return algorithm


def default_store() -> str:
    """AGL_STORE, else a SQLite file under runs/."""
    return os.environ.get("AGL_STORE") or DEFAULT_STORE


def new_run_id() -> str:
    """A readable id that sorts by time: 20261120-174501-3f9a."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid4().hex[:4]}"
