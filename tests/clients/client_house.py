"""A gateway as a process over SQLite with a scripted model behind it, for suites and clients that others wrote."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripted_engine import ScriptedEngine
from scripted_model import complete
from sdk_house import TEMPLATE
from server_process import ServerProcess
from toy_model import write_tokenizer

import build
from agentlightning.records import Call, NewRollout, WorkerStatus
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.client import LightningStoreClient

KEY = "key-of-the-tests"
MODEL = "policy"
END = 2
LEASE_S = 3600.0
"""Longer than any suite: nobody sends heartbeats."""


@dataclass
class ClientHouse:
    """The gateway, its store, and how clients find it."""

    url: str
    store: LightningStoreClient
    run_id: str
    engine: ScriptedEngine
    model: str
    rollout_id: str = ""

    async def variables(self) -> dict[str, str]:
        """A new attempt, as variables of a client's environment."""
        await self.store.enqueue([NewRollout(run_id=self.run_id, task={}, group_id="0")])
        worker = WorkerStatus(id="w", run_id=self.run_id, host="h", pid=1, running=0, seen_ns=0)
        [claim] = await self.store.claim(worker, lease_s=LEASE_S)
        self.rollout_id = claim.rollout.id
        root = f"{self.url}/r/{claim.rollout.id}/{claim.lease.attempt}"
        return {
            "OPENAI_BASE_URL": f"{root}/v1",
            "OPENAI_API_KEY": claim.key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": claim.key,
            "AGL_KEY": claim.key,
            "AGL_MODEL": self.model,
        }

    async def calls(self) -> list[Call]:
        """Everything that was recorded of the last attempt."""
        return await self.store.calls([self.rollout_id])


@asynccontextmanager
async def open_house(folder: Path, model: str = MODEL) -> AsyncIterator[ClientHouse]:
    """Everything started, and ended with the block; agents know the model by this name."""
    renderer = Renderer(write_tokenizer(folder / "tokenizer", TEMPLATE))

    def answers(request: dict[str, Any]) -> list[int]:
        prompt = renderer.decode(request["token_ids"], special=True)
        structured = request["sampling_params"].get("structured_outputs") or {}
        return [*renderer.encode(complete(prompt, structured.get("grammar"))), END]

    engine = await ScriptedEngine(answers, chunk=4).start()
    server = ServerProcess(f"sqlite:///{folder}/agl.db", folder / "server.log", KEY).start()
    try:
        async with LightningStoreClient(server.url, KEY) as store:
            run = await store.create_run("clients", {})
            await store.put_resources([build.policy(run.id, engine.url, folder / "tokenizer", model)])
            yield ClientHouse(server.url, store, run.id, engine, model)
    finally:
        server.close()
        await engine.close()
