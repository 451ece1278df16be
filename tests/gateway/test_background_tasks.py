"""A server whose background tasks fail: it says so, counts it, starts them again, and is ready again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from agentlightning.gateway.app import App
from agentlightning.gateway.server_settings import ServerSettings
from agentlightning.store.sql.store import InMemoryLightningStore

DEADLINE_S = 100.0

LEASE_S = 2.0
"""Short, so that a test need not wait long; a search that is late by a sixth of it starts the wait for a whole one again."""


class BrokenStore(InMemoryLightningStore):
    """A store whose leases cannot be checked, as by a mistake of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = True
        self.looks: asyncio.Queue[None] = asyncio.Queue()

    async def expire_leases(self, within_s: float | None = None) -> int:
        self.looks.put_nowait(None)
        if self.broken:
            raise KeyError("a mistake")
        return await super().expire_leases(within_s)


@asynccontextmanager
async def started(app: App) -> AsyncIterator[httpx.AsyncClient]:
    """The application between the two events of its life."""
    events: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
    said: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan"}, events.get, said.put))
    events.put_nowait({"type": "lifespan.startup"})
    await said.get()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client
    events.put_nowait({"type": "lifespan.shutdown"})
    await life


def leasing(store: InMemoryLightningStore) -> App:
    """An application over leases so short that it soon looks for those to give up."""
    return App(store, settings=ServerSettings(lease_s=LEASE_S))


async def ask(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """What the server answers; its tasks had a turn before."""
    await asyncio.sleep(0)
    return await client.get(path)


async def test_a_server_whose_lease_expiry_failed_is_not_ready_until_it_goes_on() -> None:
    async with BrokenStore() as store, started(leasing(store)) as client, asyncio.timeout(DEADLINE_S):
        await store.looks.get()
        while (ready := await ask(client, "/readyz")).status_code == 200:
            pass
        assert ready.status_code == 503
        assert ready.json()["reason"] == "lease expiry: failed, and is started again; the server's log says why"
        await store.looks.get()
        store.broken = False
        await store.looks.get()
        while (await ask(client, "/readyz")).status_code != 200:
            pass
        metrics = (await client.get("/metrics")).text
    counted = metrics.split('agl_background_failures_total{task="lease expiry"} ')[1].split()[0]
    assert float(counted) >= 2
    assert "agl_background_down 0.0" in metrics
