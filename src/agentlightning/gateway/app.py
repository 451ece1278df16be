"""The ASGI application of the server process: gateway, REST face of the store, health and metrics.

Driven by uvicorn (`python -m agentlightning.gateway`) or by a test. It routes by the first part of the path, in bare ASGI;
what agents call goes to the proxy, ``/api`` to the store's REST face. The store is opened and closed by whoever made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import orjson
from uuid_utils import uuid7

from agentlightning.errors import StoreError
from agentlightning.gateway.api import create_api
from agentlightning.gateway.auth import Attempts
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.proxy import Proxy
from agentlightning.gateway.reply import Incoming, Receive, Reply, Scope, Send
from agentlightning.gateway.upstreams import Upstreams
from agentlightning.protocols import chat
from agentlightning.protocols.neutral import Refusal
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore
from agentlightning.types import Finish, Resource

log = logging.getLogger(__name__)

EXPIRY_S = 1.0
"""Seconds between two looks for leases that have run out."""


def create_app(
    store: LightningStore,
    server_key: str | None = None,
    *,
    load_renderer: Callable[[str], Renderer] = Renderer,
    patience_s: float = 30.0,
) -> App:
    """The application over an open store. `server_key` guards ``/api``; `patience_s` is how long engines may be away."""
    return App(store, server_key, load_renderer, patience_s)


class App:
    """An ASGI application."""

    def __init__(
        self,
        store: LightningStore,
        server_key: str | None,
        load_renderer: Callable[[str], Renderer],
        patience_s: float,
    ) -> None:
        self.boot = str(uuid7())
        """Names this start of the server; every response carries it, so that clients notice a restart."""
        self._boot = self.boot.encode()
        self._store = store
        self._attempts = Attempts(store)
        self._upstreams = Upstreams(store, load_renderer, patience_s)
        self._metrics = GatewayMetrics()
        self._proxy = Proxy(store, self._attempts, self._upstreams, self._metrics)
        watched = cast(LightningStore, _WatchedStore(store, self._attempts, self._upstreams))
        self._api: Any = create_api(watched, server_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's event, by ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def close(self) -> None:
        """Close the connections to engines."""
        await self._upstreams.close()

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith("/api/") or path == "/api":
            mounted = {**scope, "root_path": scope.get("root_path", "") + "/api"}
            await self._api(mounted, receive, self._stamped(send))
            return
        reply = Reply(send, self._boot)
        if path == "/healthz":
            await reply.whole(200, b'{"status":"ok"}')
        elif path == "/readyz":
            await self._ready(reply)
        elif path == "/metrics":
            await reply.whole(200, self._metrics.text(), self._metrics.content_type.encode())
        else:
            try:
                incoming = Incoming(scope, receive)
            except Refusal as refusal:
                await reply.whole(refusal.status, chat.error(refusal))
                return
            await self._proxy(incoming, reply)

    def _stamped(self, send: Send) -> Send:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-agl-boot", self._boot)]}
            await send(message)

        return stamped

    async def _ready(self, reply: Reply) -> None:
        try:
            await self._store.runs(limit=1)
        except StoreError as cause:
            await reply.whole(503, orjson.dumps({"status": "unavailable", "reason": str(cause)}))
        else:
            await reply.whole(200, b'{"status":"ready"}')

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        expiry = asyncio.create_task(self._expire_leases())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        expiry.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await expiry
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _expire_leases(self) -> None:
        while True:
            try:
                if await self._store.expire_leases():
                    self._attempts.forget_all()
            except StoreError as cause:
                log.warning("leases were not checked: %s", cause)
            await asyncio.sleep(EXPIRY_S)


class _WatchedStore:
    """The store as ``/api`` sees it: the gateway hears of what makes its caches old."""

    def __init__(self, store: LightningStore, attempts: Attempts, upstreams: Upstreams) -> None:
        self._store = store
        self._attempts = attempts
        self._upstreams = upstreams

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._store, verb)

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        done = await self._store.finish(finishes)
        self._attempts.forget({finish.lease.rollout_id for finish in finishes})
        return done

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        count = await self._store.cancel(rollout_ids)
        self._attempts.forget(set(rollout_ids))
        return count

    async def put_resources(self, resources: Sequence[Resource]) -> list[Resource]:
        stored = await self._store.put_resources(resources)
        self._upstreams.forget({resource.run_id for resource in resources})
        return stored
