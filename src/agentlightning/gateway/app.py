"""The ASGI application of the server process: gateway, REST API of the store, health and metrics.

Driven by uvicorn (`python -m agentlightning.gateway`) or by a test. It routes by the first part of the path: agents' calls
go to the proxy, ``/api`` to the store's REST API. The caller opens and closes the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uuid_utils import uuid7

from agentlightning.errors import AgentLightningError, StoreError
from agentlightning.gateway.access import Authentication, Permissions, RoleError, error_body
from agentlightning.gateway.asgi_response import (
    AWAY,
    STOPPING,
    AgentRequest,
    AgentResponse,
    Receive,
    Scope,
    Send,
    plain_path,
)
from agentlightning.gateway.attempts import AttemptCache, LeaseExpiry
from agentlightning.gateway.external_calls import ExternalCalls
from agentlightning.gateway.external_client import ExternalDirectory
from agentlightning.gateway.limits import CallLimits
from agentlightning.gateway.metrics import GatewayMetrics, StoreMetrics
from agentlightning.gateway.otlp import TraceReceiver
from agentlightning.gateway.policy.calls import DEADLINE_S, GRACE_S, PolicyCalls
from agentlightning.gateway.policy.engine_router import PATIENCE_S, EngineRouter, Renderers
from agentlightning.gateway.proxy import ClientParts, Proxy
from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.gateway.rest import create_api
from agentlightning.gateway.server_settings import ServerSettings
from agentlightning.gateway.store_rpc import ApiHooks
from agentlightning.protocols import chat, generate_content, messages
from agentlightning.protocols.base import ApiError, WireFormat
from agentlightning.records import Call
from agentlightning.rendering.renderer import Renderer
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient

log = logging.getLogger(__name__)

RECORDING_TIMEOUT_S = 10.0
"""For calls that the end of the server cuts off."""
EXPOSED = ("x-agl-ignored", "x-agl-session", "x-request-id", "retry-after")
"""Headers of responses that web pages of other origins may read."""


class App:
    """The application over an open store."""

    def __init__(
        self,
        store: LightningStore,
        server_key: str | None = None,
        *,
        load_renderer: Callable[[str], Renderer] = Renderer,
        patience_s: float = PATIENCE_S,
        grace_s: float = GRACE_S,
        deadline_s: float = DEADLINE_S,
        settings: ServerSettings | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`server_key` guards ``/api``; `patience_s` is how long engines may be away, `grace_s` how long a call goes on
        after its agent has gone, `deadline_s` how long one may take; `on_stop` is
        called when the server is about to end."""
        self._settings = settings or ServerSettings()
        self._server_key = server_key
        self.boot = str(uuid7())
        """Id of this start of the server; every response carries it, so that clients notice a restart."""
        self._boot = self.boot.encode()
        self._stopping = asyncio.Event()
        self._on_stop = on_stop
        self._finished = asyncio.Event()
        self._calls = 0
        self._store = store
        self._attempts = AttemptCache(store, shared=store.shared, keyless=server_key is None)
        self._metrics = GatewayMetrics()
        self.background = BackgroundTasks()
        """The loops of this server; they end with `close`."""
        self._loops = [self.background, *([store.background] if store.background is not None else [])]
        self._store_metrics = StoreMetrics(store, self._loops, self._metrics.registry)
        self._watcher = ResourceWatcher(store, self._changed, self.background)
        keys = self._settings.external_keys
        renderers = Renderers(store, load_renderer)
        self._engine_router = EngineRouter(self._watcher, self._metrics, renderers, patience_s, keys)
        self._external = ExternalCalls(store, self._attempts, ExternalDirectory(keys), self._metrics, grace_s=grace_s)
        self._limits = CallLimits(store, self._settings.limits)
        self._authentication = Authentication(store, server_key)
        self._policy_calls = PolicyCalls(
            store, self._attempts, self._engine_router, self._metrics, grace_s=grace_s, deadline_s=deadline_s
        )
        self._proxy = self._make_proxy()
        self._api = self._make_api()
        self._entry: ASGIApp = self._http
        if origins := self._settings.cors_origins:
            self._entry = CORSMiddleware(
                self._http, origins, allow_methods=("GET", "HEAD", "POST"), allow_headers=("*",), expose_headers=EXPOSED
            )

    def _make_proxy(self) -> Proxy:
        store, clients = self._store, None
        if self._settings.clients is not None:
            clients = self._settings.clients(
                ClientParts(
                    store=store,
                    attempts=self._attempts,
                    watcher=self._watcher,
                    authentication=self._authentication,
                    limits=self._limits,
                )
            )
        traces = TraceReceiver(store, self._attempts, self._limits, self._metrics, self._authentication)
        return Proxy(
            store,
            attempts=self._attempts,
            engine_router=self._engine_router,
            external=self._external,
            calls=self._policy_calls,
            metrics=self._metrics,
            traces=traces,
            limits=self._limits,
            clients=clients,
            watcher=self._watcher,
        )

    def _make_api(self) -> Any:
        return create_api(
            self._store,
            self._server_key,
            boot=self.boot,
            stopping=self._stopping,
            hooks=ApiHooks(
                on_claim=self._attempts.expect,
                on_end=self._ended,
                on_calls=self._learn,
                on_resources=self._watcher.forget,
            ),
            external_keys=self._settings.external_keys,
            authentication=self._authentication,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's event, by ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._entry(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        reply = AgentResponse(send, self._boot)
        of_agent = path.startswith(("/r/", "/v1")) and self._settings.metrics_port is None
        if (not of_agent or self._stopping.is_set()) and await self._answered(scope, receive, reply):
            return
        self._calls += 1
        try:
            try:
                incoming = AgentRequest(scope, receive)
            except ApiError as refusal:
                await reply.whole(refusal.status, chat.error(refusal))
            else:
                await self._proxy(incoming, reply)
        finally:
            self._calls -= 1
            if self._calls == 0 and self._stopping.is_set():
                self._finished.set()

    def stop(self) -> None:
        """The server is about to end: long polls return, new calls are refused, and those in flight go on."""
        self._stopping.set()
        self._on_stop()
        self._policy_calls.stop()
        if self._calls == 0:
            self._finished.set()

    async def finished(self) -> None:
        """Wait, after `stop`, until no agent's request is being answered."""
        await self._finished.wait()

    async def close(self) -> None:
        """Close the connections to engines and external models, once calls that were cut off are recorded."""
        await self.background.stop()
        if self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._finished.wait(), RECORDING_TIMEOUT_S)
        await self._watcher.close()
        await self._engine_router.close()
        await self._external.close()
        self._policy_calls.close()

    def _learn(self, calls: Sequence[Call]) -> None:
        """Another gateway recorded these through this server."""
        self._attempts.learn(calls)
        self._limits.learn(calls)

    def _ended(self, rollout_ids: set[str]) -> None:
        """The attempts of these rollouts have ended."""
        self._attempts.forget(rollout_ids)
        self._limits.forget(rollout_ids)

    def _changed(self, run_id: str) -> None:
        """A run has new resources, or is not in use any more."""
        self._engine_router.forget(run_id)
        self._external.directory.forget(run_id)

    async def _answered(self, scope: Scope, receive: Receive, reply: AgentResponse) -> bool:
        """Answers what is not an agent's request; False where it is one, for the proxy."""
        path: str = scope["path"]
        port = self._settings.metrics_port
        of_store = path == "/api" or path.startswith("/api/")
        elsewhere = port is not None and (scope["server"][1] == port) != (path == "/metrics")
        if elsewhere and path not in ("/healthz", "/readyz"):
            await reply.whole(404, b'{"error":{"message":"not on this port"}}')
        elif of_store:
            await self._api({**scope, "root_path": scope.get("root_path", "") + "/api"}, receive, reply.send)
        elif path == "/healthz":
            await reply.whole(200, b'{"status":"ok"}')
        elif path == "/readyz":
            await self._ready(reply)
        elif path == "/metrics":
            await self._show_metrics(scope, reply)
        elif self._stopping.is_set():
            await _refuse_stopping(path, reply)
        else:
            return False
        return True

    async def _show_metrics(self, scope: Scope, reply: AgentResponse) -> None:
        """The numbers of all runs: for callers that may read their statistics, or any on a port of their own."""
        if self._settings.metrics_port is None:
            try:
                caller = await self._authentication.caller(scope["headers"])
                asked = await Permissions(self._store).check(caller, "statistics", {"run_id": None})
                if asked["run_id"] is not None:
                    raise RoleError(f"/metrics: has the numbers of all runs; this token opens run {caller.run_id} only")
            except AgentLightningError as cause:
                await reply.whole(cause.http_status, error_body(type(cause), str(cause)))
                return
        await self._store_metrics.look()
        await reply.whole(200, self._metrics.text(), self._metrics.content_type.encode())

    async def _ready(self, reply: AgentResponse) -> None:
        reason = STOPPING if self._stopping.is_set() else ""
        if not reason and (down := [name for loops in self._loops for name in loops.down]):
            reason = f"{', '.join(down)}: failed, and is started again; the server's log says why"
        if not reason:
            try:
                await self._store.runs(limit=1)
            except StoreError as cause:
                reason = str(cause)
        if reason:
            await reply.whole(503, orjson.dumps({"status": "unavailable", "reason": reason}))
        else:
            await reply.whole(200, b'{"status":"ready"}')

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        if not isinstance(self._store, LightningStoreClient):  # else another process owns the store and its leases
            expiry = LeaseExpiry(self._store, self._attempts.forget_all, lease_s=self._settings.lease_s)
            self.background.start("lease expiry", expiry.run)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})


async def _refuse_stopping(path: str, reply: AgentResponse) -> None:
    path = plain_path(path)
    refusal = ApiError(STOPPING, status=503, type="server_error", code="stopping")
    shape: WireFormat = chat
    if path.endswith(("/v1/messages", "/v1/messages/count_tokens")):
        shape = messages
    elif "/v1beta/models" in path:
        shape = generate_content
    await reply.whole(503, shape.error(refusal), headers=AWAY)
