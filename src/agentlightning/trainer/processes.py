"""Processes: everything that runs beside the trainer for one run, started and ended together.

The trainer, the evaluation and the check use it. It knows which process needs what; not what any of them does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from agentlightning.config import Config
from agentlightning.engines.local.engine import LearnerOptions, LocalEngine, SamplerOptions
from agentlightning.errors import ModelError
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.supervisor import Supervisor
from agentlightning.types import JSON

T = TypeVar("T")


class Processes:
    """The processes of one run, started and ended together: server, store client, engine, workers."""

    def __init__(self, config: Config, folder: RunFolder, server: str | None = None) -> None:
        self._config = config
        self._folder = folder
        self._server = server
        self._supervisor = Supervisor(folder.path, config.store.url)
        self.engine = _engine(config, folder)
        self.store: LightningStore
        self.policy: JSON = {}

    async def __aenter__(self) -> Self:
        try:
            starting = asyncio.ensure_future(self.engine.start())
            if self._server is None:
                self._server = await self._supervisor.start_server()
            self.store = LightningStoreClient(self._server, self._supervisor.server_key)
            await self.store.open()
            self.policy = {
                "model": Path(self._config.model.path).name,
                "endpoints": await starting,
                "tokenizer": self._config.model.path,
                "seed": self._config.trainer.seed,
            }
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        # The server goes last: it finishes what it accepted.
        await self.engine.close()
        if hasattr(self, "store"):
            await self.store.close()
        await self._supervisor.stop()

    def start_workers(self) -> None:
        """Start the configured workers; each runs `concurrency` rollouts at a time."""
        agent = self._config.agent
        arguments = ["--server", str(self._server), "--run", self._folder.run_id]
        arguments += ["--agent", agent.run] if agent.run is not None else ["--command", str(agent.command)]
        arguments += ["--concurrency", str(agent.concurrency), "--model", self.policy["model"]]
        if agent.reward is not None:
            arguments += ["--reward", agent.reward]
        self._supervisor.start_workers(agent.workers, arguments)

    def pids(self) -> dict[str, int]:
        """Process ids of the server and the workers, by name."""
        return self._supervisor.pids()

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; if a child cannot be kept running meanwhile, cancel it and raise that child's error."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._supervisor.watch())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                watch.result()
            return await task
        finally:
            for each in (task, watch):
                each.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)


def _engine(config: Config, folder: RunFolder) -> LocalEngine:
    path = config.model.path
    local = Path(path)
    if (local.is_absolute() or path.startswith((".", "~")) or local.exists()) and not (local / "config.json").exists():
        raise ModelError(f"model.path: {path} is not a model folder (it has no config.json)")
    engine = config.engine
    rate = config.trainer.learning_rate
    return LocalEngine(
        path,
        work_dir=folder.path,
        sampler=SamplerOptions(
            threads=engine.sampler_threads, max_rows=engine.max_rows, dtype=engine.dtype, device=engine.device
        ),
        learner=LearnerOptions(
            threads=engine.learner_threads,
            optimizer=engine.optimizer,
            muon_learning_rate_ratio=(engine.muon_learning_rate or rate) / rate,
            weight_decay=engine.weight_decay,
            max_tokens_per_microbatch=engine.microbatch_tokens,
            dropout=engine.dropout,
            dtype=engine.dtype,
            device=engine.device,
            seed=config.trainer.seed,
        ),
    )
