"""Middleware of the REST API: what every request to /api must get past before anything of it is read or parsed.

An ASGI middleware around the API. It wants a caller that authentication.py knows, and, on a server without a key, one that
is no web page; bounds the size of a body and the time that it may take to arrive; sends the id of this start of the server
with every answer; and answers for bugs, whose tracebacks go to the log. Knows no route.
"""

from __future__ import annotations

import logging

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning import errors
from agentlightning.errors import AgentLightningError, InputError
from agentlightning.gateway.asgi_response import AWAY, read_body, too_large
from agentlightning.gateway.authentication import Authentication, cross_site_reason
from agentlightning.protocols.base import ApiError
from agentlightning.store.http_transport import BOOT_HEADER

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024 * 1024
"""Bytes of one request: batches of rollouts and of calls are larger than anything that an agent sends."""
CALLER = "agentlightning.caller"
"""Entry of the scope that says who asks, a `Caller`."""
BODY_TIMEOUT_S = 120.0
"""Timeout for receiving a body."""


def error_body(kind: type[AgentLightningError], message: str) -> bytes:
    """An error as JSON, under the name of the nearest class that clients know."""
    known = next(base for base in kind.__mro__ if base.__module__ == errors.__name__)
    return orjson.dumps({"error": {"type": known.__name__, "message": message}})


class ApiMiddleware:
    """The middleware."""

    def __init__(
        self,
        app: ASGIApp,
        boot: str,
        authentication: Authentication,
        largest: int = MAX_BODY_BYTES,
        body_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._app = app
        self._header = (BOOT_HEADER.encode(), boot.encode())
        self._authentication = authentication
        self._largest = largest
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's event, by ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = _TaggedResponse(send, self._header)
        try:
            self._check(scope)
            scope = {**scope, CALLER: await self._authentication.caller(scope["headers"])}
            body = await read_body(receive, self._largest, self._body_s)
            await self._app(scope, _replayed(body, receive), response.send)
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

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        if self._authentication.server_key is None and (why := cross_site_reason(scope["method"], headers)):
            raise _CrossSiteError(why)
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if not length.isdigit() or int(length[:20]) > self._largest:
            raise too_large(self._largest)


class _CrossSiteError(InputError):
    http_status = 403


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Receives a body that was read already; after it, whether the caller hung up."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again


class _TaggedResponse:
    """The answer, with the id of this start of the server."""

    def __init__(self, send: Send, header: tuple[bytes, bytes]) -> None:
        self._send = send
        self._header = header
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [*message.get("headers", ()), self._header]
        await self._send(message)

    async def error(self, status: int, kind: type[AgentLightningError], said: str) -> None:
        body = error_body(kind, said)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += AWAY if status == 503 else ()
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
