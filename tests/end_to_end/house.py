"""A server with one run and a scripted engine, and workers of it as processes: everything is real but the model."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from command_line import DEADLINE_S, Folder
from scripted_engine import ScriptedEngine
from toy_model import write_tokenizer

from agentlightning.gateway.server import AgentLightningServer
from agentlightning.records import JSON, NewRollout, Resource, Rollout
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.client import LightningStoreClient

KEY = "key-of-the-tests"
END = 2
ANSWER = "It is sunny."


class House:
    """What agents made of their tasks, and what the command line shows of it."""

    def __init__(self, server: str, store: LightningStoreClient, run_id: str, folder: Folder) -> None:
        self.server = server
        self.store = store
        self.run_id = run_id
        self.folder = folder

    async def rollouts(self, agent: str, *tasks: JSON, before: int = 0, **env: str) -> list[Rollout]:
        """What a worker process with this agent and environment makes of these tasks; `before`: rollouts finished so far."""
        new = [
            NewRollout(run_id=self.run_id, task=task, group_id=str(place)) for place, task in enumerate(tasks, before)
        ]
        queued = await self.store.enqueue(new)
        worker = self.folder.start(
            "worker", agent, "--server", self.server, "--run", self.run_id, env={"AGL_SERVER_KEY": KEY, **env}
        )
        finished = await self.store.wait(self.run_id, at_least=before + len(tasks), timeout_s=DEADLINE_S)
        worker.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(worker.wait, DEADLINE_S) == 0
        by_id = {rollout.id: rollout for rollout in finished}
        return [by_id[rollout.id] for rollout in queued]

    async def agl(self, *arguments: str) -> str:
        """What a command prints about this server's store."""
        env = {"AGL_SERVER_KEY": KEY, "AGL_STORE": self.server}
        done = await asyncio.to_thread(self.folder.run, *arguments, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout


@asynccontextmanager
async def open_house(
    folder: Folder, config: JSON | None = None, says: Callable[[str], str] = lambda _: ANSWER
) -> AsyncIterator[House]:
    """`config`: of the run. `says`: what the model answers to a prompt."""
    tokenizer = await asyncio.to_thread(write_tokenizer, folder.path / "tokenizer")
    renderer = Renderer(tokenizer)

    def answer(request: JSON) -> list[int]:
        return [*renderer.encode(says(renderer.decode(request["token_ids"], special=True))), END]

    engine = await ScriptedEngine(answer, tokenizer=tokenizer).start()
    value = {"model": "policy", "endpoints": [engine.url], "tokenizer": str(tokenizer), "seed": 7}
    # Not "127.0.0.1": an address of this machine that no rule about loopback exempts from a proxy.
    with AgentLightningServer("memory://", host="0.0.0.0", server_key=KEY) as server:
        async with LightningStoreClient(server.url, KEY) as store:
            run = await store.create_run("house", config or {})
            await store.put_resources([Resource(run_id=run.id, name="default", kind="policy", value=value)])
            yield House(server.url, store, run.id, folder)
    await engine.close()
