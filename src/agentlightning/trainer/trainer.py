"""Trainer: puts a run together, starts its processes, runs the loop and takes everything down again.

It is what a user calls and what the command line calls. The process that runs it is the supervisor of design: children are
the server (gateway and store), the sampler, the learner and the workers; this process loads neither torch nor a web server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import orjson

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config import Config, parse_config
from agentlightning.errors import ConfigError
from agentlightning.runner.user_code import agent_spec
from agentlightning.trainer.checkpoint import RunFolder, last_checkpoint
from agentlightning.trainer.collect import Collector
from agentlightning.trainer.curve import draw_curve
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.rl import Loop
from agentlightning.trainer.tasks import load_tasks
from agentlightning.types import JSON, RunState

log = logging.getLogger(__name__)

Tasks = str | Sequence[JSON]


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
        server: URL of a server that runs already (its key in AGL_SERVER_KEY); None starts one.
        """
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
            "store": {"url": store or default_store()},
        }
        for name, values in (settings or {}).items():
            table[name] = {**table.get(name, {}), **values}
        self._table = table
        self._runs = Path(runs)
        self._server = server
        self._progress = progress or Silent()
        self._loop: Loop | None = None
        self._stop_requested = False

    def fit(
        self,
        agent: Callable[..., Any] | str,
        train: Tasks,
        val: Tasks | None = None,
        reward: Callable[..., float] | str | None = None,
    ) -> Result:
        """Train until the last step and return. Works in scripts and notebooks: the loop runs in a thread of its own.

        Args:
            agent: a callable ``(task, llm) -> reward``, sync or async, or ``file.py:name``.
            train: task rows, or a source as in `load_tasks`.
            val: held-out task rows, never trained on.
            reward: ``(task, result) -> reward``; None: the agent's return value.

        Ctrl-C ends training after the step that is under way; a second Ctrl-C ends it at once.
        """
        outcome: list[Result | BaseException] = []

        def work() -> None:
            try:
                outcome.append(asyncio.run(self.afit(agent, train, val, reward)))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=work, name="trainer")
        thread.start()
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt:
                if self._stop_requested:
                    raise
                self.stop()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    async def afit(
        self,
        agent: Callable[..., Any] | str,
        train: Tasks,
        val: Tasks | None = None,
        reward: Callable[..., float] | str | None = None,
    ) -> Result:
        """`fit` as a coroutine."""
        folder = RunFolder(self._runs, new_run_id())
        folder.path.mkdir(parents=True, exist_ok=True)
        table = dict(self._table)
        table["agent"] = {**table["agent"], "run": agent if isinstance(agent, str) else agent_spec(agent, folder.path)}
        if reward is not None:
            table["agent"]["reward"] = reward if isinstance(reward, str) else agent_spec(reward, folder.path)
        table["data"] = {"train": _tasks_source(train, folder.path / "train.jsonl")}
        if val is not None:
            table["data"]["val"] = _tasks_source(val, folder.path / "val.jsonl")
        return await self.run(parse_config(table, "Trainer"), folder)

    def stop(self) -> None:
        """Ask the run to end after the step that is under way, with a checkpoint."""
        self._stop_requested = True
        if self._loop is not None:
            self._loop.stopping = True

    async def run(self, config: Config, folder: RunFolder, *, resume: bool = False, name: str = "") -> Result:
        """Train as configured in this folder; with `resume`, go on from the run's last checkpoint."""
        algorithm = algorithm_of(config)
        seed = config.trainer.seed
        train = load_tasks(config.data.train, config.data.fields, seed)
        val = load_tasks(config.data.val, config.data.fields, seed)[: config.eval.tasks] if config.data.val else []
        if not resume:
            folder.create(config)
        async with Processes(config, folder, self._server) as processes:
            store = processes.store
            if resume:
                await store.update_run(folder.run_id, state="running")
            else:
                await store.create_run(
                    name or Path(config.agent.run or config.agent.command or "").name, _plain(config), folder.run_id
                )
            loop = self._loop = Loop(
                config=config,
                algorithm=algorithm,
                run_id=folder.run_id,
                folder=folder,
                store=store,
                engine=processes.engine,
                collector=Collector(store, folder.run_id),
                policy=processes.policy,
                train=train,
                val=val,
                progress=self._progress,
                stopping=self._stop_requested,
            )
            processes.start_workers()
            state: RunState = "failed"
            try:
                step = await processes.beside(loop.run(resume))
                state = "finished" if step == config.trainer.steps else "interrupted"
            except asyncio.CancelledError:
                state = "interrupted"
                raise
            finally:
                await store.update_run(folder.run_id, state=state)
            checkpoint = await last_checkpoint(store, folder.run_id)
        rows = folder.metrics()
        draw_curve(rows, f"{folder.run_id}", folder.path / "curve.png")
        return Result(
            run_id=folder.run_id,
            folder=folder.path,
            policy=Path(checkpoint.path) if checkpoint is not None else folder.path,
            step=step,
            finished=state == "finished",
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
    return LightningRL(**table)


def default_store() -> str:
    """AGL_STORE, else a SQLite file under runs/."""
    return os.environ.get("AGL_STORE", "sqlite:///runs/agl.db")


def new_run_id() -> str:
    """A readable id that sorts by time: 20261120-174501-3f9a."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid4().hex[:4]}"


def _tasks_source(tasks: Tasks, file: Path) -> str:
    """A source that a resumed run can read again: rows in memory go to the run folder."""
    if isinstance(tasks, str):
        return tasks
    rows: Iterable[JSON] = load_tasks(tasks)
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return str(file.resolve())


def _plain(config: Config) -> JSON:
    return config.model_dump(mode="json")
