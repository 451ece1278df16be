"""One HTTP exchange in bare ASGI: what came in, and the answer going out. The hot path pays for nothing more.

Driven by the app and the proxy; knows nothing of what the bytes mean.
"""

from __future__ import annotations

from typing import Any

from agentlightning.protocols.neutral import Refusal

LARGEST_BODY = 64 * 1024 * 1024

Scope = Any
Receive = Any
Send = Any


class Incoming:
    """A request to the proxy."""

    __slots__ = ("_host", "_receive", "_scheme", "client", "is_retry", "key", "method", "named", "path", "route")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._scheme: str = scope.get("scheme", "http")
        self._host = ""
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.client: str | None = scope["client"][0] if scope.get("client") else None
        self.key: str | None = None
        self.is_retry = False
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, credentials = value.decode("latin-1").partition(" ")
                self.key = credentials.strip() if scheme.lower() == "bearer" else None
            elif name == b"x-stainless-retry-count":
                self.is_retry = value != b"0"
            elif name == b"host":
                self._host = value.decode("latin-1")
        self.named, self.route = _split(self.path)
        """The attempt that the path names, and what comes after /v1/ (None where the path is not of that form)."""

    async def body(self) -> bytes:
        """The whole body."""
        message = await self._receive()
        if not message.get("more_body"):
            return bytes(message.get("body", b""))
        parts = [message.get("body", b"")]
        size = len(parts[0])
        while message.get("more_body"):
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Refusal("the client went away before its request was complete", status=499)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > LARGEST_BODY:
                raise Refusal(f"the body is larger than {LARGEST_BODY} bytes", status=413)
        return b"".join(parts)

    def base_url(self, identity: tuple[str, int] | None) -> str:
        """The base URL that this caller should use."""
        where = f"/r/{identity[0]}/{identity[1]}" if identity is not None else ""
        return f"{self._scheme}://{self._host}{where}/v1"


class Reply:
    """The answer to one request: whole, or a stream of events."""

    __slots__ = ("_boot", "_send", "started")

    def __init__(self, send: Send, boot: bytes) -> None:
        self._send = send
        self._boot = boot
        self.started = False

    async def send(self, message: Any) -> None:
        """Pass on a message of an inner application."""
        self.started = True
        await self._send(message)

    async def whole(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """Send everything at once."""
        self.started = True
        headers = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            (b"x-agl-boot", self._boot),
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def start_events(self, first: bytes) -> None:
        """Begin a stream of server-sent events."""
        self.started = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-agl-boot", self._boot),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.more(first)

    async def more(self, events: bytes) -> None:
        """Send events."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Send the last events and end the stream."""
        await self._send({"type": "http.response.body", "body": events})


def _split(path: str) -> tuple[tuple[str, int] | None, str | None]:
    """(attempt, route under /v1/) of a path.

    >>> _split("/r/abc/2/v1/chat/completions")
    (('abc', 2), 'chat/completions')
    >>> _split("/v1/models")
    (None, 'models')
    >>> _split("/r/abc/2/chat/completions")
    (('abc', 2), None)
    """
    named = None
    rest = path
    if path.startswith("/r/"):
        rollout_id, _, rest = path[3:].partition("/")
        number, slash, rest = rest.partition("/")
        if not (number.isascii() and number.isdigit() and len(number) < 6):
            raise Refusal(
                f"{path}: expected /r/<rollout>/<attempt>/v1/…, with the number of the attempt",
                status=404,
                code="unknown_route",
            )
        named = (rollout_id, int(number))
        rest = slash + rest
    return named, rest[4:] if rest.startswith("/v1/") else None
