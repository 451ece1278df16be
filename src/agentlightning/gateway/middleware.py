"""The edge of the REST face: what every request to /api must get past before anything of it is read or parsed.

An ASGI middleware around the API. It wants the server key, or, on a server without one, a caller that is no web page; bounds
the size of a body and the time that it may take to arrive; sends the id of this start of the server with every answer; and
answers for bugs, whose tracebacks go to the log. Knows no route.
"""

from __future__ import annotations

import asyncio
import logging

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, InputError
from agentlightning.gateway.access import cross_site_reason, presents_key
from agentlightning.store.http_transport import BOOT_HEADER

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024 * 1024
"""Bytes of one request: batches of rollouts and of calls are larger than anything that an agent sends."""
BODY_TIMEOUT_S = 120.0
"""Timeout for receiving a body."""


class ServerKeyError(ConfigError):
    """The caller may not."""

    http_status = 401


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
        server_key: str | None,
        largest: int = MAX_BODY_BYTES,
        body_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._app = app
        self._header = (BOOT_HEADER.encode(), boot.encode())
        self._server_key = server_key
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
            await self._app(scope, _BoundedBody(receive, self._largest, self._body_s).receive, response.send)
        except AgentLightningError as refusal:
            log.info("%s %s refused: %s", scope["method"], scope["path"], refusal)
            if response.started:
                raise
            await response.error(refusal.http_status, type(refusal), str(refusal))
        except HTTPException as refusal:
            await response.error(refusal.status_code, InputError, refusal.detail)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if response.started:
                raise
            said = f"internal error ({type(error).__name__}); the server's log has more"
            await response.error(500, AgentLightningError, said)

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        if self._server_key is None:
            if why := cross_site_reason(scope["method"], headers):
                raise _CrossSiteError(why)
        elif not presents_key(headers, self._server_key):
            raise ServerKeyError(
                "server key: missing or wrong; send `Authorization: Bearer` with the server's AGL_SERVER_KEY"
            )
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if not length.isdigit() or int(length[:20]) > self._largest:
            raise _too_large(self._largest)


class _CrossSiteError(InputError):
    http_status = 403


class _BoundedBody:
    """The body as it arrives, within its bounds; after it, whether the caller hung up."""

    def __init__(self, receive: Receive, largest: int, body_s: float) -> None:
        self._receive = receive
        self._largest = largest
        self._deadline = asyncio.get_running_loop().time() + body_s
        self._body_s = body_s
        self._size = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._body_s:.0f} s") from None
        self._size += len(message.get("body", b""))
        if self._size > self._largest:
            raise _too_large(self._largest)
        self._complete = not message.get("more_body", False)
        return message


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
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def _too_large(largest: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {largest} bytes")  # of the errors, FastAPI passes on only these
