"""House: a gateway over a store in memory and a scripted engine; everything real but the model."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI
from scripted_engine import ScriptedEngine

from agentlightning.gateway.app import App
from agentlightning.gateway.external_keys import ExternalKeys, external_keys
from agentlightning.gateway.server_settings import ServerSettings
from agentlightning.records import Claim, Mode, NewRollout, Resource, Sampling, WorkerStatus
from agentlightning.rendering.renderer import Renderer
from agentlightning.serving.sessions import UserSessions
from agentlightning.store.base import LightningStore
from agentlightning.store.tokens import mint_key

SERVER_KEY = "server-key"
KEYS = external_keys(["JUDGE_KEY=127.0.0.1", "TEST_ENGINE_KEY=127.0.0.1"])
END = 2
LEASE_S = 600.0
"""Nobody sends heartbeats for the claims of tests, and a busy machine takes its time."""


class AttemptKeys(httpx.Auth):
    """Adds the key that an agent would have sent."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        named = re.match(r"/r/([0-9a-f-]{36})/(\d+)(/|$)", request.url.path)
        if named and not {"authorization", "x-api-key"} & set(request.headers):
            request.headers["authorization"] = f"Bearer {mint_key(self._secret, named[1], int(named[2]))}"
        yield request


@dataclass
class House:
    """A store with one run, an engine, and any number of gateways and agents."""

    store: LightningStore
    engine: ScriptedEngine
    renderer: Renderer
    folder: Path
    run_id: str = ""
    secret: bytes = b""
    """Signs the keys of attempts."""
    app: App = field(init=False)
    _apps: list[App] = field(default_factory=list)
    _clients: list[httpx.AsyncClient] = field(default_factory=list)

    async def start(self) -> House:
        self.secret = await self.store.signing_secret()
        self.run_id = (await self.store.create_run("test", {"agent": {"reward": []}})).id
        await self.serve_policy()
        self.app = self.gateway()
        return self

    async def serve_policy(self, **changes: Any) -> None:
        value = {
            "model": "policy",
            "endpoints": [self.engine.url],
            "tokenizer": str(self.folder),
            "seed": 7,
            **changes,
        }
        await self.store.put_resources([Resource(run_id=self.run_id, name="default", kind="policy", value=value)])

    def gateway(
        self,
        store: LightningStore | None = None,
        patience_s: float = 60.0,
        *,
        external_keys: ExternalKeys = KEYS,
        settings: ServerSettings | None = None,
        **others: Any,
    ) -> App:
        """A new gateway over the same store, as after a restart."""
        settings = replace(settings or ServerSettings(), external_keys=external_keys, clients=UserSessions)
        app = App(store or self.store, SERVER_KEY, patience_s=patience_s, settings=settings, **others)
        self._apps.append(app)
        return app

    async def claim(
        self, group: str = "g", replica: int = 0, sampling: Sampling | None = None, mode: Mode = "train"
    ) -> Claim:
        rollout = NewRollout(
            run_id=self.run_id, task={}, group_id=group, replica=replica, sampling=sampling or Sampling(), mode=mode
        )
        await self.store.enqueue([rollout])
        worker = WorkerStatus(id="w", run_id=self.run_id, host="h", pid=1, running=0, seen_ns=0)
        return (await self.store.claim(worker, lease_s=LEASE_S))[0]

    def http(self, app: App | None = None, address: str = "127.0.0.1", *, adds_keys: bool = True) -> httpx.AsyncClient:
        """A client of the gateway; a request that has no key gets that of the attempt in its path, unless told otherwise."""
        transport = httpx.ASGITransport(app or self.app, client=(address, 1))
        auth = AttemptKeys(self.secret) if adds_keys else None
        client = httpx.AsyncClient(transport=transport, base_url="http://gateway", auth=auth)
        self._clients.append(client)
        return client

    async def metrics(self, app: App | None = None) -> str:
        key = {"authorization": f"Bearer {SERVER_KEY}"}
        return (await self.http(app).get("/metrics", headers=key)).text

    def openai(self, claim: Claim, app: App | None = None, **settings: Any) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=f"http://gateway{path(claim)}/v1",
            api_key=claim.key,
            http_client=self.http(app),
            **{"max_retries": 0, **settings},
        )

    def say(self, *texts: str) -> None:
        """Script the next answers; the last one is repeated."""
        left = list(texts)
        self.engine.answers = lambda _: [*self.renderer.encode(left.pop(0) if len(left) > 1 else left[0]), END]

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()
        for app in self._apps:
            await app.close()


def path(claim: Claim) -> str:
    return f"/r/{claim.rollout.id}/{claim.lease.attempt}"
