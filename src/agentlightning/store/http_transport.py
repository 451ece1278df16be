"""HttpTransport: requests to a server, each executed once though connections break and servers restart.

Driven by LightningStoreClient; the other side is gateway/store_rpc.py. A request whose connection could not be made or broke
is sent again until the retry timeout has passed, since a server that is restarted comes back on its port and networks
come back too. Every request that writes carries a key, under which the store records what it did: once, whoever is asked.
Bodies for servers far away are compressed: that pays below some 250 Mbit/s, so not on one machine nor in one network.
Knows no method.
"""

from __future__ import annotations

import asyncio
import copy
import ipaddress
import json
import os
import ssl
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec
import orjson
import uuid_utils

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, StoreError
from agentlightning.runtime.backoff import Backoff
from agentlightning.store import wire
from agentlightning.store.audit import Actor

BOOT_HEADER = "x-agl-boot"
KEY_HEADER = "idempotency-key"
CLIENT_CERT_VARIABLE = "AGL_TLS_CLIENT_CERT"
CLIENT_KEY_VARIABLE = "AGL_TLS_CLIENT_KEY"
ACTOR_HEADER = "x-agl-actor"
"""Names, to the server that has the store, whom a further server acts for, as an `Actor` in JSON."""

RETRY_TIMEOUT_S = 600.0
"""Seconds that a server may be away: its machine may be restarted, and the network may be out for minutes."""
FIRST_RETRY_TIMEOUT_S = 30.0
"""The same before its first response: then the address may be wrong, which somebody wants to know."""
RESPONSE_TIMEOUT_S = 60.0
"""Seconds a server may take for a response, beyond what it is asked to wait."""

MIN_COMPRESSED_BYTES = 4096
"""Smaller bodies are not compressed: that saves no packet worth having."""
MIN_OFFLOADED_BYTES = 256 * 1024
"""Bodies whose compression takes milliseconds: done in a thread."""
MAX_RESPONSE_BYTES = 2 * 1024**3
"""Bytes of a response, decompressed."""
GZIP = 16 + zlib.MAX_WBITS

BATCH = "batch"
"""The route that takes several requests as a list of `wire.Entry`, and answers with a list of `wire.EntryResult`."""


class StoreResponse(NamedTuple):
    """The server's response to one request."""

    content: bytes
    error: AgentLightningError | None
    """The error that it raised, as the class it was."""


class HttpTransport:
    """Requests to the server at `url`. Use from one event loop."""

    def __init__(
        self, url: str, server_key: str | None, retry_timeout_s: float = RETRY_TIMEOUT_S, compress: bool | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._key = server_key
        self._retry_timeout_s = retry_timeout_s
        self._compress = not is_local(self._url) if compress is None else compress
        self._session: aiohttp.ClientSession | None = None
        self.boots: frozenset[str] = frozenset()
        """Ids of the starts of servers that have answered."""

    async def open(self) -> None:
        """Ready for requests; connects to nothing yet."""
        if self._session is None:
            headers = {"content-type": wire.CONTENT_TYPE}
            if self._key:
                headers["authorization"] = f"Bearer {self._key}"
            headers["accept-encoding"] = "gzip" if self._compress else "identity"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=_client_tls(self._url)),
                headers=headers,
                auto_decompress=False,
            )

    async def close(self) -> None:
        """End the connections; requests under way fail."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(self, requests: Sequence[tuple[str, bytes]]) -> Sequence[StoreResponse]:
        """The responses to requests that write, method and arguments each. They travel together, are executed side by side,
        and are executed once. StoreError where the server cannot be reached."""
        entries = [wire.Entry(method, str(uuid_utils.uuid7()), msgspec.Raw(body)) for method, body in requests]
        if len(entries) == 1:
            [(method, body)] = requests
            return [await self.request(method, body, key=entries[0].key)]
        whole = await self.request(BATCH, wire.encode(entries, BATCH))
        if whole.error is not None:
            return [StoreResponse(b"", copy.copy(whole.error)) for _ in entries]
        return [
            StoreResponse(each.content, self._error(entry.method, each.status, each.content))
            for entry, each in zip(entries, wire.decode_entry_results(whole.content), strict=True)
        ]

    async def request(
        self, method: str, body: bytes, *, key: str = "", wait_s: float = 0.0, actor: Actor | None = None
    ) -> StoreResponse:
        """The response to one request, sent until there is one. StoreError where the server cannot be reached.

        `key` names a request that must not be executed twice. `wait_s`: how long the server was asked to wait. `actor`:
        for whom it is sent.
        """
        headers = {KEY_HEADER: key} if key else {}
        if actor is not None:
            headers[ACTOR_HEADER] = json.dumps(asdict(actor))  # ASCII, unlike orjson's
        if self._compress and len(body) >= MIN_COMPRESSED_BYTES:
            headers["content-encoding"] = "gzip"
            body = await compressed(body)
        timeout_s = self._retry_timeout_s if self.boots else min(self._retry_timeout_s, FIRST_RETRY_TIMEOUT_S)
        backoff = Backoff(first_s=0.05, timeout_s=timeout_s)
        while True:
            try:
                status, content = await self._send_once(method, body, headers, wait_s)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                if isinstance(error, aiohttp.ClientConnectorCertificateError) or not await backoff.sleep():
                    raise self._unreachable(str(error) or type(error).__name__, error) from error
                continue
            if content is not None:
                break
            if not await backoff.sleep():
                raise self._unreachable(f"status {status}")
        return StoreResponse(content, self._error(method, status, content))

    async def _send_once(
        self, method: str, body: bytes, headers: dict[str, str], wait_s: float
    ) -> tuple[int, bytes | None]:
        """Status and content; None for the latter where it is a server's or proxy's way to say: not now."""
        if self._session is None:
            raise StoreError(f"the store at {self._url} is not open: use `async with store`, or await store.open()")
        timeout = aiohttp.ClientTimeout(total=RESPONSE_TIMEOUT_S + wait_s, sock_connect=10.0)
        url = f"{self._url}/api/{method}"
        async with self._session.post(url, data=body, headers=headers, timeout=timeout) as response:
            content = await response.read()
            given = response.headers
            if response.status in (502, 503, 504) and ("retry-after" in given or BOOT_HEADER not in given):
                return response.status, None
            if (boot := given.get(BOOT_HEADER)) is not None and boot not in self.boots:
                self.boots |= {boot}
            if given.get("content-encoding") == "gzip":
                content = await decompressed(content, MAX_RESPONSE_BYTES)
            return response.status, content

    def _unreachable(self, reason: str, error: BaseException | None = None) -> StoreError:
        todo = "is it running?"
        silent = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            todo = "name the root that signed its certificate in SSL_CERT_FILE"
        elif not self.boots and silent and not isinstance(error, aiohttp.ClientConnectorError):
            # Somebody took the connection, and ended it without a word.
            if not self._url.startswith("https://"):
                todo = "is it served as https://?"
            elif os.environ.get(CLIENT_CERT_VARIABLE):
                todo = f"does it trust the client certificate of {CLIENT_CERT_VARIABLE}?"
        return StoreError(f"the server at {self._url} cannot be reached ({reason}); {todo}")

    def _error(self, method: str, status: int, content: bytes) -> AgentLightningError | None:
        """The error that the server raised, as the class it was; None where it raised none."""
        if status == 200:
            return None
        try:
            given = orjson.loads(content)["error"]
            kind, message = getattr(errors, given["type"], None), str(given["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            where = f"{self._url}/api/{method}"
            return StoreError(f"{where}: expected an answer of an Agent Lightning server, got status {status}")
        if not isinstance(kind, type) or not issubclass(kind, AgentLightningError) or kind is errors.MissingExtraError:
            kind = StoreError
        return (ConfigError if status == 401 else kind)(message)


def _client_tls(url: str) -> ssl.SSLContext | bool:
    """The TLS settings for an https server: it is verified by the system's roots (or SSL_CERT_FILE), and shown the client
    certificate that the environment names. Raises ConfigError."""
    cert, key = (os.environ.get(name) or None for name in (CLIENT_CERT_VARIABLE, CLIENT_KEY_VARIABLE))
    if not url.startswith("https://"):
        return True
    context = ssl.create_default_context()
    if cert is key is None:
        return context
    if cert is None or key is None:
        raise ConfigError(f"{CLIENT_CERT_VARIABLE}, {CLIENT_KEY_VARIABLE}: expected both, or neither")
    for name, file in ((CLIENT_CERT_VARIABLE, cert), (CLIENT_KEY_VARIABLE, key)):
        if not Path(file).is_file():
            raise ConfigError(f"{name}: there is no file {file!r}")
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # else a key with a password would ask the terminal
    except OSError as cause:
        raise ConfigError(
            f"{CLIENT_CERT_VARIABLE}, {CLIENT_KEY_VARIABLE}: expected files with a certificate and its key without a "
            f"password, in PEM: {cause}"
        ) from cause
    return context


def is_local(url: str) -> bool:
    """Returns whether the server is on this machine or, as far as its name tells, in this network.

    >>> is_local("http://127.0.0.1:80"), is_local("http://10.1.2.3:80"), is_local("http://gateway:80")
    (True, True, True)
    >>> is_local("https://agl.example.com"), is_local("http://8.8.8.8:80")
    (False, False)
    """
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host or host.endswith((".localhost", ".local", ".internal"))


async def compressed(content: bytes) -> bytes:
    """Content compressed by gzip, at its fastest."""
    if len(content) >= MIN_OFFLOADED_BYTES:
        return await asyncio.to_thread(_compress, content)
    return _compress(content)


async def decompressed(content: bytes, max_bytes: int) -> bytes:
    """Content that gzip compressed. StoreError where it is damaged, or more than `max_bytes`."""
    if len(content) >= MIN_OFFLOADED_BYTES:
        return await asyncio.to_thread(_decompress, content, max_bytes)
    return _decompress(content, max_bytes)


def _compress(content: bytes) -> bytes:
    return zlib.compress(content, 1, GZIP)


def _decompress(content: bytes, max_bytes: int) -> bytes:
    packer = zlib.decompressobj(GZIP)
    try:
        plain = packer.decompress(content, max_bytes + 1)
    except zlib.error as error:
        raise StoreError(f"the compressed body is damaged: {error}") from None
    if len(plain) > max_bytes:
        raise StoreError(f"the body is larger than {max_bytes} bytes")
    if not packer.eof or packer.unused_data:
        raise StoreError("the compressed body is damaged: it does not end where its content does")
    return plain
