"""The methods of the store over HTTP: one POST each, its arguments by name; msgpack for our client, JSON for others.
Every request to /api passes here: its caller must be known (access.py) and, on a server without a key, no web page; its
body is bounded in size and time. A method is decoded in one pass, allowed and executed once for the request that its
key names (store/request.py); other paths go on to rest.py."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.config.base import Table, parse_settings
from agentlightning.config.external import ExternalModelConfig
from agentlightning.config.run import LimitsConfig
from agentlightning.errors import AgentLightningError, InputError, NotFoundError, StoreError
from agentlightning.gateway.access import Authentication, Caller, Permissions, cross_site_reason, error_body
from agentlightning.gateway.asgi_response import AWAY, STOPPING, disconnected, read_body, too_large
from agentlightning.protocols.base import ApiError
from agentlightning.records import Call, Claim, Metric
from agentlightning.store import wire
from agentlightning.store.base import LightningStore
from agentlightning.store.request import binding, requested

log = logging.getLogger(__name__)

MSGPACK = wire.CONTENT_TYPE.encode()
KEY_HEADER = wire.KEY_HEADER.encode()
MAX_KEY_CHARS = 128
MAX_BODY_BYTES = 256 * 1024 * 1024
"""Bytes of one request: batches of rollouts and of calls are larger than anything that an agent sends."""
BODY_TIMEOUT_S = 120.0
"""Timeout for receiving a body."""
CALLER = "agentlightning.caller"
"""Entry of the scope that says who asks, a `Caller`."""

RESOURCE_SETTINGS: Mapping[str, type[Table]] = {"external": ExternalModelConfig, "limits": LimitsConfig}
"""By kind of resource, the settings that it holds. They are checked before they are stored: the stores know no settings, and
JSON of theirs has no NaN, so that a bound or a price of NaN would be read as none."""

LONG_POLLS = frozenset({"claim", "wait", "wait_aliases", "wait_resources", "follow_metrics"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiHooks:
    """Called with what a method did, before it is answered; must not block."""

    on_claim: Callable[[Sequence[Claim]], None] = lambda _: None
    """Claims that were granted."""
    on_end: Callable[[set[str]], None] = lambda _: None
    """Rollouts whose attempts were finished or cancelled."""
    on_calls: Callable[[Sequence[Call]], None] = lambda _: None
    """Calls that were recorded."""
    on_resources: Callable[[str], None] = lambda _: None
    """A run that got new resources."""


class StoreRpc:
    """The API of an open store; `others` serves what is no method. Long polls end when `stopping` is set."""

    max_body_bytes = MAX_BODY_BYTES
    body_timeout_s = BODY_TIMEOUT_S

    def __init__(
        self,
        store: LightningStore,
        others: ASGIApp,
        permissions: Permissions,
        authentication: Authentication,
        *,
        boot: str,
        hooks: ApiHooks,
        stopping: asyncio.Event,
    ) -> None:
        self._methods: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            name: getattr(store, name) for name in wire.METHODS
        }
        self._others = others
        self._permissions = permissions
        self._authentication = authentication
        self._boot = (wire.BOOT_HEADER.encode(), boot.encode())
        self._hooks = hooks
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's event, by ASGI."""
        response = _Response(send, self._boot)
        try:
            await self._serve(scope, receive, response)
        except AgentLightningError as refusal:
            log.info("%s %s refused: %s", scope["method"], scope["path"], refusal)
            if response.started:
                raise
            await response.error(refusal.http_status, type(refusal), str(refusal))
        except ApiError as refusal:
            await response.error(refusal.status, InputError, refusal.message)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if response.started:
                raise
            said = f"internal error ({type(error).__name__}); the server's log has more"
            await response.error(500, AgentLightningError, said)

    async def _serve(self, scope: Scope, receive: Receive, response: _Response) -> None:
        headers = dict(scope["headers"])
        if self._authentication.server_key is None and (why := cross_site_reason(scope["method"], scope["headers"])):
            raise _CrossSiteError(why)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        caller = await self._authentication.caller(scope["headers"])
        body = await read_body(receive, self.max_body_bytes, self.body_timeout_s)
        name = scope["path"].removeprefix(scope.get("root_path", "")).removeprefix("/")
        if scope["method"] != "POST" or (name not in self._methods and name != wire.BATCH):
            await self._others({**scope, CALLER: caller}, _replayed(body, receive), response.send)
            return
        if (encoding := headers.get(b"content-encoding", b"identity")) != b"identity":
            raise ApiError(f"Content-Encoding: expected none, got {encoding[:80].decode('latin-1')!r}", status=415)
        binary = headers.get(b"content-type") == MSGPACK
        if name == wire.BATCH:
            status, content = 200, await self._respond_to_all(body, caller)
        else:
            work = self._respond(name, body, headers.get(KEY_HEADER, b"").decode("latin-1"), binary, caller)
            status, content = await (self._poll(receive, work) if name in LONG_POLLS else work)
        sent = [(b"content-type", MSGPACK if binary and status == 200 else b"application/json")]
        await response.whole(status, content, sent)

    async def _respond(
        self, name: str, body: bytes | msgspec.Raw, key: str, binary: bool, caller: Caller
    ) -> tuple[int, bytes]:
        """Status and content of the response to one method; an error of ours is one too, and always JSON."""
        if len(key) > MAX_KEY_CHARS:
            raise InputError(f"{wire.KEY_HEADER}: expected at most {MAX_KEY_CHARS} characters")
        try:
            given = wire.decode_arguments(name, body, as_json=not binary)
            if caller.role != "admin" or name == "put_resources":
                given = await self._permissions.check(caller, name, given)
            for resource in given["resources"] if name == "put_resources" else ():
                if resource.kind in RESOURCE_SETTINGS:
                    where = f"external.{resource.name}" if resource.kind == "external" else resource.kind
                    parse_settings(RESOURCE_SETTINGS[resource.kind], resource.value, where, ".")
            # Of the caller, too: an answer is nobody else's, whoever learns the name of the request.
            with binding(caller.binds), requested(key and f"{caller.token_id} {name} {key}", bytes(body)):
                result = await self._methods[name](**given)
            self._after(name, given, result)
            return 200, wire.encode_result(name, result) if binary else _as_json(name, result)
        except AgentLightningError as error:
            return error.http_status, error_body(type(error), str(error))

    def _after(self, method: str, given: dict[str, Any], result: Any) -> None:
        if method == "claim":
            self._permissions.learn({claim.rollout.id: claim.rollout.run_id for claim in result})
            self._hooks.on_claim(result)
        elif method in ("revoke_token", "create_run"):
            self._authentication.forget()
        elif method == "finish":
            ended = zip(given["finishes"], result, strict=True)
            self._hooks.on_end({one.lease.rollout_id for one, held in ended if held})
        elif method == "cancel":
            self._hooks.on_end(set(given["rollout_ids"]))
        elif method == "append_calls":
            self._hooks.on_calls(given["calls"])
        elif method == "put_resources":
            for run_id in {resource.run_id for resource in result}:
                self._hooks.on_resources(run_id)

    async def _respond_to_all(self, body: bytes, caller: Caller) -> bytes:
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
            *[self._respond(each.method, each.arguments, each.key, True, caller) for each in entries]
        )
        return wire.encode([wire.EntryResult(*response) for response in responses], wire.BATCH)

    async def _poll(self, receive: Receive, work: Coroutine[Any, Any, tuple[int, bytes]]) -> tuple[int, bytes]:
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


class _CrossSiteError(InputError):
    http_status = 403


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Receives a body that was read already; after it, whether the caller hung up."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again


class _Response:
    """The answer, with the id of this start of the server."""

    def __init__(self, send: Send, boot: tuple[bytes, bytes]) -> None:
        self._send = send
        self._boot = boot
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [*message.get("headers", ()), self._boot]
        await self._send(message)

    async def whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        headers += (b"content-length", str(len(body)).encode()), self._boot
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def error(self, status: int, kind: type[AgentLightningError], said: str) -> None:
        headers = [(b"content-type", b"application/json"), *(AWAY if status == 503 else ())]
        await self.whole(status, error_body(kind, said), headers)


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
