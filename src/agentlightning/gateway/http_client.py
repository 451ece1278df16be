"""HttpClient: POST and GET over HTTP/1.1 connections that are kept open, without a cap on their number.

Driven by policy/engine_router.py and external_client.py for every call, of which a general client takes a fifth. It follows
no redirects, keeps no cookies, reads no proxy settings, and sends again only what met a connection that its server had just
closed. All that goes wrong on the way is an OSError.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import httptools

from agentlightning.errors import EngineError

IDLE_TIMEOUT_S = 60.0
"""A connection that was not used for so long is closed."""
MAX_BUFFERED = 1024 * 1024
"""Bytes of a response that wait to be read before the sender has to wait, too."""
MAX_HEAD_BYTES = 256 * 1024
"""Bytes that may come before the body of a response begins."""
MAX_DECOMPRESSED = 1024 * 1024
"""Bytes of a decompressed body that are handed on at once: a few of gzip may be a thousand times as many."""
MAX_BODY_BYTES = 64 * 1024 * 1024
"""Bytes of a body that is read as a whole."""
MAX_IDLE_CLOSE_S = 0.2
"""Time in which a server that had closed a kept connection is known to have; later, it may have worked on the request."""
CONNECTION_LOST = "the connection was closed before the response was complete"


class _Origin(NamedTuple):
    host: str
    port: int
    tls: bool


class _Inflater:
    """Decompresses a body, of one member of gzip or of several, into parts of bounded size. Raises OSError."""

    def __init__(self) -> None:
        self._member: Any = None

    def feed(self, packed: bytes) -> Iterator[bytes]:
        """Yields what these bytes hold."""
        while packed:
            if self._member is None or self._member.eof:
                self._member = zlib.decompressobj(wbits=47)
            full = True
            while full:  # where it is, what is left of the input or of the output is still in the member
                try:
                    plain = self._member.decompress(packed, MAX_DECOMPRESSED)
                except zlib.error as cause:
                    raise ConnectionError(f"the body cannot be decompressed: {cause}") from cause
                packed, full = self._member.unconsumed_tail, len(plain) == MAX_DECOMPRESSED
                yield plain
            packed = self._member.unused_data.lstrip(b"\0") if self._member.eof else b""  # zeros may pad the end

    def finish(self) -> None:
        """The body has ended."""
        if self._member is not None and not self._member.eof:
            raise ConnectionError("the body cannot be decompressed: it ends early")


class HttpClient:
    """Connections by where they lead. Use from one event loop."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[_Origin, deque[HttpResponse]] = {}
        self._busy: set[HttpResponse] = set()
        self._tls: ssl.SSLContext | None = None

    async def close(self) -> None:
        """Close all connections; a second call does nothing."""
        for connection in (*self._busy, *(one for idle in self._idle.values() for one in idle)):
            connection.transport.abort()
        self._idle.clear()

    async def get(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        """Ask for a page, as `post` does."""
        return await self.post(url, headers, b"", "GET")

    async def post(
        self,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        method: str = "POST",
        on_send: Callable[[], None] = lambda: None,
    ) -> HttpResponse:
        """Send a request; returns when the head of the response has arrived. Raises OSError. `on_send` is called before each
        time that it is sent: at most twice, where the first connection was closed as idle."""
        origin, head = _request_head(method, url, tuple(headers.items()))
        request = [b"%s%d\r\n\r\n" % (head, len(body)), body]
        idle = self._idle.get(origin)
        while idle:
            kept = idle.pop()  # the one used last, so that what is too much becomes old
            sent = time.monotonic()
            if kept.transport.is_closing() or sent - kept.idle_since >= IDLE_TIMEOUT_S:
                kept.transport.close()
                continue
            try:
                return await self._exchange(kept, request, on_send)
            except ConnectionError:
                # Its server may have closed it, as idle, while the request was on its way: then nothing came back, at once.
                if kept.head_bytes or time.monotonic() - sent > MAX_IDLE_CLOSE_S:
                    raise
                break
        return await self._exchange(await self._connect(origin), request, on_send)

    async def _exchange(
        self, connection: HttpResponse, request: list[bytes], on_send: Callable[[], None]
    ) -> HttpResponse:
        self._busy.add(connection)
        try:
            on_send()
            connection.begin(request)
            while not connection.has_head:
                await connection.wait()
        except BaseException:
            self.release(connection)
            raise
        return connection

    def release(self, connection: HttpResponse) -> None:
        """Keep a connection for the next request, or close it where the response was not read to its end."""
        self._busy.discard(connection)
        fits = connection.buffered <= MAX_BUFFERED  # else reading is paused
        if not (connection.complete and connection.keeps_alive and fits) or connection.transport.is_closing():
            connection.transport.abort()
            return
        connection.idle_since = time.monotonic()
        idle = self._idle.setdefault(connection.origin, deque())
        idle.append(connection)
        while idle[0].idle_since < connection.idle_since - IDLE_TIMEOUT_S:
            idle.popleft().transport.close()

    async def _connect(self, origin: _Origin) -> HttpResponse:
        oldest = time.monotonic() - IDLE_TIMEOUT_S
        for other, idle in list(self._idle.items()):  # an engine that is restarted has another port
            while idle and idle[0].idle_since < oldest:
                idle.popleft().transport.close()
            if not idle:
                del self._idle[other]
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await loop.create_connection(
                lambda: HttpResponse(self, origin, loop),
                origin.host,
                origin.port,
                ssl=self._tls if origin.tls else None,
            )
        return connection


class HttpResponse(asyncio.Protocol):
    """A response whose head has arrived, and its connection, which has at most one request under way.

    A context manager that gives the connection back, or closes it.
    """

    transport: asyncio.Transport

    def __init__(self, client: HttpClient, origin: _Origin, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self.origin = origin
        self.idle_since = 0.0
        self._loop = loop
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._lost: OSError | None = None
        self.keeps_alive = False
        self._forget()  # the connection may be lost, or the server may speak, before there is a request
        self.complete = True

    def begin(self, data: list[bytes]) -> None:
        """Send a request, and forget the last response."""
        self._forget()
        self.transport.writelines(data)

    def _forget(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By their names in lower case."""
        self.has_head = False
        self.head_bytes = 0
        self._parts: list[bytes] = []
        self.buffered = 0
        self._waits_for_end = False
        self.complete = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.release(self)

    async def read(self) -> bytes:
        """The whole body. Raises OSError where it ends early, EngineError where it is too large."""
        if "content-encoding" not in self.headers:
            body = await self._receive(True)
            if self.complete and not self._parts:
                return body
        else:
            body = b""
        parts = [body]
        size = len(body)
        async for part in self.chunks(whole=True):
            parts.append(part)
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise EngineError(f"a response is larger than {MAX_BODY_BYTES} bytes")
        return b"".join(parts)

    async def chunks(self, whole: bool = False) -> AsyncIterator[bytes]:
        """The body as it arrives, or `whole`: in as few parts as may be buffered. Raises OSError where it ends early."""
        packed = self.headers.get("content-encoding") in ("gzip", "deflate")
        inflater = _Inflater() if packed else None
        while part := await self._receive(whole):
            if inflater is None:
                yield part
                continue
            for plain in inflater.feed(part):
                yield plain
        if inflater is not None:
            inflater.finish()

    async def _receive(self, whole: bool) -> bytes:
        """The part of the body that has arrived, once there is something, or as much of the whole body as may be buffered;
        nothing at its end. Raises OSError."""
        self._waits_for_end = whole
        while not self.complete and (not self._parts or (whole and self.buffered <= MAX_BUFFERED)):
            await self.wait()
        self._waits_for_end = False
        parts, self._parts = self._parts, []
        if self.buffered > MAX_BUFFERED:
            self.transport.resume_reading()
        self.buffered = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def wait(self) -> None:
        """Returns when something has arrived. Raises OSError where the connection was lost."""
        if self._lost is not None:
            raise self._lost
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # --- by the event loop ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.head_bytes += 0 if self.has_head else len(data)
        try:
            self._parser.feed_data(data)
            if not self.has_head and self.head_bytes > MAX_HEAD_BYTES:
                raise httptools.HttpParserError(f"more than {MAX_HEAD_BYTES} bytes of headers")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as cause:
            self._lost = ConnectionError(f"the response is not HTTP: {cause}")
            self.transport.abort()
        wakes = self.complete or not self._waits_for_end or self.buffered > MAX_BUFFERED or self._lost is not None
        if wakes and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        delimited = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self.has_head and not delimited and exc is None:
            self.complete = True  # the end of the connection is the end of the body
        self.keeps_alive = False
        self._lost = self._lost or (exc if isinstance(exc, OSError) else ConnectionError(CONNECTION_LOST))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- by the parser ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:  # it would be taken for the answer to the next request, or for a part of the last
            raise httptools.HttpParserError("there was no request for it")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.has_head = self.status >= 200
        self.keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self.buffered += len(body)
        if self.buffered > MAX_BUFFERED:
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.has_head:
            self.complete = True
        else:  # 100 Continue, say: the response is still to come
            self.headers = {}


@lru_cache(maxsize=1024)
def _request_head(method: str, url: str, headers: tuple[tuple[str, str], ...]) -> tuple[_Origin, bytes]:
    """Returns where a request goes, and its head up to the length of its body. Raises OSError for a URL that leads
    nowhere."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as cause:
        raise OSError(f"{url!r} is no URL: {cause}") from cause
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OSError(f"{url!r} is no http or https URL")
    try:
        parts.hostname.encode("idna")
    except UnicodeError as cause:
        raise OSError(f"{url!r} is no URL: {cause}") from cause
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if lines.count("\n") != len(headers):
        raise OSError("a header holds a line break; look at the key in the environment")
    tls = parts.scheme == "https"
    origin = _Origin(parts.hostname, port or (443 if tls else 80), tls)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    first = f"{method} {path} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n"
    return origin, f"{first}{lines}content-length: ".encode("latin-1", "replace")
