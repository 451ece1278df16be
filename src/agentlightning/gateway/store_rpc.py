"""The methods of the store over HTTP: one POST each, its arguments by name; msgpack for our client, JSON for others.

An ASGI middleware inside the API's own (middleware.py); other paths go on to FastAPI, whose routes describe the methods and
serve people. Workers call methods thousands of times a second, so they are served here in bare ASGI: a body is unpacked,
checked against the method's signature in one pass, allowed (roles.py) and executed for the request that its key names
(store/audit.py): once. Knows nothing of how a store works.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import msgspec
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.config.base import Table, parse_settings
from agentlightning.config.external import ExternalModelConfig
from agentlightning.config.limits import LimitsConfig
from agentlightning.errors import AgentLightningError, InputError, NotFoundError, StoreError
from agentlightning.gateway.access import CALLER, MAX_BODY_BYTES, Caller, Permissions, error_body
from agentlightning.gateway.asgi_response import STOPPING, disconnected
from agentlightning.protocols.base import ApiError
from agentlightning.records import Metric
from agentlightning.store import wire
from agentlightning.store.audit import acting_as, requested
from agentlightning.store.base import LightningStore
from agentlightning.store.http_transport import BATCH, KEY_HEADER, MIN_COMPRESSED_BYTES, compressed, decompressed

MSGPACK = wire.CONTENT_TYPE.encode()

MAX_KEY_CHARS = 128

RESOURCE_SETTINGS: Mapping[str, type[Table]] = {
    "external": ExternalModelConfig,
    "limits": LimitsConfig,
}
"""By kind of resource, the settings that it holds. They are checked before they are stored: the stores know no settings, and
JSON of theirs has no NaN, so that a bound or a price of NaN would be read as none."""

LONG_POLLS = frozenset({"claim", "wait", "wait_aliases", "wait_resources", "follow_metrics"})

After = Callable[[str, dict[str, Any], Any], None]
"""Called with a method that was executed: its name, arguments and result."""


class RpcResponse(NamedTuple):
    """The response to a request."""

    status: int
    body: bytes


class StoreMethod:
    """One method of an open store."""

    def __init__(self, store: LightningStore, name: str, permissions: Permissions, after: After) -> None:
        self.name = name
        self._permissions = permissions
        self._execute: Callable[..., Coroutine[Any, Any, Any]] = getattr(store, name)
        self._after = after

    async def execute(self, body: bytes | msgspec.Raw, binary: bool, caller: Caller) -> RpcResponse:
        """The response to a request with this body; an error of ours is one too, and always JSON."""
        try:
            given = wire.decode_arguments(self.name, body, as_json=not binary)
            given = await self._permissions.check(caller, self.name, given)
            for resource in given["resources"] if self.name == "put_resources" else ():
                if resource.kind in RESOURCE_SETTINGS:
                    where = f"external.{resource.name}" if resource.kind == "external" else resource.kind
                    parse_settings(RESOURCE_SETTINGS[resource.kind], resource.value, where, ".")
            with acting_as(caller.actor):
                result = await self._execute(**given)
            self._after(self.name, given, result)
            return RpcResponse(200, wire.encode_result(self.name, result) if binary else _as_json(self.name, result))
        except AgentLightningError as error:
            return RpcResponse(error.http_status, error_body(type(error), str(error)))


class StoreRpc:
    """The middleware."""

    def __init__(
        self,
        app: ASGIApp,
        methods: Sequence[StoreMethod],
        stopping: asyncio.Event,
    ) -> None:
        """Long polls end when `stopping` is set."""
        self._app = app
        self._stopping = stopping
        self._methods = {method.name: method for method in methods}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's event, by ASGI."""
        name = ""
        if scope["type"] == "http" and scope["method"] == "POST":
            name = scope["path"].removeprefix(scope.get("root_path", "")).removeprefix("/")
        method = self._methods.get(name)
        if method is None and name != BATCH:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        binary = headers.get(b"content-type") == MSGPACK
        body = await _plain((await receive())["body"], headers.get(b"content-encoding", b"identity"))
        if method is None:
            status, content = await self._respond_to_all(body, scope[CALLER])
        else:
            key = headers.get(KEY_HEADER.encode(), b"").decode("latin-1")
            responding = self._respond(method, body, key, binary, scope[CALLER])
            status, content = await (self._poll(receive, responding) if name in LONG_POLLS else responding)
        sent = [(b"content-type", MSGPACK if binary and status == 200 else b"application/json")]
        if len(content) >= MIN_COMPRESSED_BYTES and b"gzip" in headers.get(b"accept-encoding", b""):
            content = await compressed(content)
            sent.append((b"content-encoding", b"gzip"))
        sent.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": content})

    async def _respond(
        self, method: StoreMethod, body: bytes | msgspec.Raw, key: str, binary: bool, caller: Caller
    ) -> RpcResponse:
        if not key:
            return await method.execute(body, binary, caller)
        if len(key) > MAX_KEY_CHARS:
            raise InputError(f"{KEY_HEADER}: expected at most {MAX_KEY_CHARS} characters")
        # Of the caller, too: an answer is nobody else's, whoever learns the name of the request.
        with requested(f"{caller.token_id} {method.name} {key}", bytes(body)):
            return await method.execute(body, binary, caller)

    async def _respond_to_all(self, body: bytes, caller: Caller) -> RpcResponse:
        """Requests that travelled together are executed side by side; each has its own response."""
        entries = wire.decode_entries(body)
        for entry in entries:
            if entry.method not in self._methods:
                raise NotFoundError(f"method: no such method: {entry.method}")
            if entry.method in LONG_POLLS:
                given = wire.decode_arguments(entry.method, entry.arguments)
                if given.get("wait_s") or given.get("timeout_s"):
                    raise InputError(f"{entry.method}: waits, which a request that travels with others may not")
        responses = await asyncio.gather(
            *[self._respond(self._methods[each.method], each.arguments, each.key, True, caller) for each in entries]
        )
        return RpcResponse(200, wire.encode([wire.EntryResult(*response) for response in responses], BATCH))

    async def _poll(self, receive: Receive, work: Coroutine[Any, Any, RpcResponse]) -> RpcResponse:
        """The result of a long poll, which ends with its caller (else a worker that died could still be given rollouts) and
        with the server."""
        polls = asyncio.ensure_future(work)
        ends = asyncio.ensure_future(disconnected(receive)), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({polls, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if polls.done():
                return polls.result()
            if self._stopping.is_set():
                raise StoreError(STOPPING)
            raise ApiError("the caller hung up", status=499)
        finally:
            for unfinished in (polls, *ends):
                unfinished.cancel()


async def _plain(body: bytes, encoding: bytes) -> bytes:
    if encoding == b"identity":
        return body
    if encoding != b"gzip":
        raise ApiError(f"Content-Encoding: expected gzip or none, got {encoding[:80].decode('latin-1')!r}", status=415)
    try:
        return await decompressed(body, MAX_BODY_BYTES)
    except StoreError as refused:
        raise ApiError(str(refused), status=413) from None


def _as_json(method: str, result: Any) -> bytes:
    """JSON has neither tuples as keys nor numbers that are none."""
    if method == "count":
        by_mode: dict[str, dict[str, int]] = {}
        for (mode, state), number in result.items():
            by_mode.setdefault(mode, {})[state] = number
        result = by_mode
    if method in ("metrics", "follow_metrics"):
        result = [metric if math.isfinite(metric.value) else _named(metric) for metric in result]
    return orjson.dumps(result)


def _named(metric: Metric) -> dict[str, Any]:
    return {**asdict(metric), "value": str(metric.value)}
