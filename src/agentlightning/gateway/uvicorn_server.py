"""UvicornServer: uvicorn with limits on what a client may hold and an end that loses nothing.

Driven by the server process and by AgentLightningServer. uvicorn bounds neither the time nor the size of a request's head,
closes no connection whose client sends a refused body for ever or never reads its response, and refuses requests (health
checks, too) where there are too many connections. Here a client has a deadline for the head of its request and for reading,
a connection too many replaces one without a request, and a server that is told to end first lets the calls in flight finish
while it refuses new ones. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from agentlightning.gateway.app import App
from agentlightning.gateway.connection_limit import allowed_connections
from agentlightning.gateway.server_settings import ServerSettings
from agentlightning.runtime.children import SERVER_GRACE_S

HEAD_TIMEOUT_S = 30.0
"""Time from a connection, or from the first byte of a further request, to the end of the request's head."""
MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request's first line and headers; of what stands between two parts of its body, and of its trailers."""
IDLE_S = 75
"""Idle timeout of a connection: longer than that of clients, so that they close first."""
WRITE_TIMEOUT_S = 300.0
"""Time in which a client that reads nothing of its response loses its connection, once its buffers are full."""
FLUSH_TIMEOUT_S = 2
"""Time for responses to be flushed once no request is being worked on."""
SELDOM_HEADERS = frozenset((b"connection", b"transfer-encoding"))
"""Headers that change how a response is sent."""
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: 43\r\nretry-after: 1\r\n"
    b"connection: close\r\n\r\nthe server has all the connections it takes"
)


class UvicornServer(uvicorn.Server):
    """Serves an app on sockets until it is told to end, then as long as its calls take, `grace_s` at most."""

    def __init__(
        self,
        app: App,
        *,
        grace_s: float = SERVER_GRACE_S,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        started: Callable[[], None] = lambda: None,
        settings: ServerSettings | None = None,
    ) -> None:
        settings = settings or ServerSettings()
        limit = ConnectionLimit(settings.max_connections or allowed_connections())
        tls, proxies = settings.tls, settings.trusted_proxies
        protocol: Any = functools.partial(
            BoundedHttpProtocol, limit=limit, head_timeout_s=head_timeout_s, write_timeout_s=write_timeout_s
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                access_log=False,
                log_config=None,
                log_level="warning",
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
                backlog=4096,
                # By itself uvicorn believes any program on this machine, and the environment.
                proxy_headers=bool(proxies),
                forwarded_allow_ips=list(proxies),
                ssl_certfile=None if tls is None else tls.cert,
                ssl_keyfile=None if tls is None else tls.key,
                server_header=False,
            )
        )
        self._app = app
        self._grace_s = grace_s
        self._tell_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new calls, wait for those in flight, then close everything."""
        self._app.stop()
        finished = asyncio.ensure_future(self._app.finished())
        deadline = self._grace_s + asyncio.get_running_loop().time()
        while not (finished.done() or self.force_exit or asyncio.get_running_loop().time() > deadline):
            await asyncio.wait([finished], timeout=0.1)  # a second Ctrl-C sets force_exit and tells nobody
        finished.cancel()
        await super().shutdown(sockets)


class Connection(Protocol):
    """A client's connection; `abort` closes it at once, whatever the client does."""

    def abort(self) -> None: ...


class ConnectionLimit:
    """The connections of one server, at most `max_connections`.

    A connection costs a file descriptor, and a client that opens thousands must keep nobody out: a new one takes the place
    of the one that has waited for a request for longest. Those with a request under way, which needs a key, keep their
    places. Nothing is counted by address, which agents behind one proxy share.
    """

    def __init__(self, max_connections: int) -> None:
        self._max = max_connections
        self._busy: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Without a request under way, the one that has waited for longest first."""

    def admit(self, connection: Connection) -> bool:
        """Count a new connection, which waits for its first request; False where all have a request under way."""
        if len(self._busy) + len(self._waiting) >= self._max:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            del self._waiting[oldest]
            oldest.abort()
        self._waiting[connection] = None
        return True

    def begin(self, connection: Connection) -> None:
        """A request is under way. One that lost its place at this moment does not get it back."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._busy.add(connection)

    def end(self, connection: Connection) -> None:
        """It waits for a further request."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._waiting[connection] = None

    def remove(self, connection: Connection) -> None:
        """It is closed."""
        self._busy.discard(connection)
        self._waiting.pop(connection, None)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection, which is closed where its client does not send what it began."""

    def __init__(
        self, *arguments: Any, limit: ConnectionLimit, head_timeout_s: float, write_timeout_s: float, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self._limit = limit
        self._head_s = head_timeout_s
        self._write_s = write_timeout_s
        self._unread: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._head = 0
        """Bytes of the head of the present request so far; -1 behind it."""
        self._framing = 0
        """Bytes since its head or the last part of its body: the parser keeps those of a trailer until it has its end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._limit.admit(self):
            transport.write(FULL)
            transport.close()
            return
        peer = cast(socket.socket | None, transport.get_extra_info("socket"))
        if peer is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # one that lost its power is noticed
        self._close_after(self._head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.remove(self)
        self._keep()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head > MAX_HEAD_BYTES:
            self.send_400_response(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")
            return
        if self._framing > MAX_HEAD_BYTES:
            self.send_400_response(f"more than {MAX_HEAD_BYTES} bytes of the request are none of its body")
            return
        if self._head >= 0:
            self._head += len(data)
        else:
            self._framing += len(data)
        super().data_received(data)
        if self._head > 0 and self._deadline is None:
            self._close_after(self._head_s)

    def on_message_begin(self) -> None:
        # Perhaps in the packet that ended the request before: its first byte is counted here then.
        self._head = self._head or 1
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head >= 0:  # else a trailer, which comes when the headers were acted upon, and is left out
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._keep()
        self._head, self._framing = -1, 0
        self._limit.begin(self)
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, _ResponseWriter(self.transport, self.loop))
        self.cycle.send = _WholeSender(self.cycle, self.transport)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next byte begins another request."""
        self._keep()
        self._head = self._framing = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A client whose body was refused may send the rest, but not for ever."""
        if self._head < 0:
            self._close_after(self._head_s)
        super().on_response_complete()
        if self.cycle.response_complete:  # else a request that was sent ahead is under way
            self._limit.end(self)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered; for how long, is bounded."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._write_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def abort(self) -> None:
        """Close the connection at once, whatever the client does."""
        self._keep()
        self.transport.abort()

    def _close_after(self, seconds: float) -> None:
        self._keep()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _keep(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _WholeSender:
    """Sends one response: a body that comes whole with its head, in one write. All else is left to uvicorn, which takes
    three times as long for the same."""

    __slots__ = ("_cycle", "_send", "_start", "_transport")

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        self._cycle = cycle
        self._transport = transport
        self._send: Callable[[Any], Awaitable[None]] = cycle.send
        self._start: Any = None

    async def __call__(self, message: Any) -> None:
        """Take a message of ASGI."""
        if message["type"] == "http.response.start" and any(
            name == b"content-length" for name, _ in message["headers"]
        ):
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None and self._write(start, message):
            return
        if start is not None:
            await self._send(start)
        await self._send(message)

    def _write(self, start: Any, message: Any) -> bool:
        """False where it is not as simple."""
        cycle, body = self._cycle, message.get("body", b"")
        if message.get("more_body") or cycle.disconnected or cycle.response_started or not cycle.keep_alive:
            return False
        if cycle.flow.write_paused or cycle.scope["method"] == "HEAD":
            return False
        head, values = STATUS_LINE[start["status"]], b""
        for name, value in (*cycle.default_headers, *start["headers"]):
            if name in SELDOM_HEADERS or (name == b"content-length" and value != b"%d" % len(body)):
                return False
            head += b"%s: %s\r\n" % (name, value)
            values += value
        if HEADER_VALUE_RE.search(values):
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self._transport.writelines((head, b"\r\n", body))
        cycle.message_event.set()
        cycle.on_response()
        return True


class _ResponseWriter:
    """Writes one response: its head waits for the first part of its body, and both leave as one packet."""

    __slots__ = ("_head", "_loop", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """Send `data`, now or in the next turn of the event loop."""
        if self._head is None:
            self._head = data
            self._loop.call_soon(self._flush)
        elif self._head:
            self._transport.writelines((self._head, data))
            self._head = b""
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""
