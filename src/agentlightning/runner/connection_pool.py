"""HTTP clients that every agent of a process shares: one pool for each event loop, one for all threads.

Building an SDK client costs 16 ms of CPU without a shared HTTP client, nearly all of it TLS set-up, and a new connection for
each rollout on top. Driven by `LLM`; knows nothing of rollouts. Imports HTTP libraries only when a client is asked for.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import ssl
import threading
from collections.abc import AsyncGenerator
from typing import Any

TIMEOUT_S = 600.0
"""Longest silence of a call, as in the SDKs: a gateway holds calls while weights are exchanged."""
CONNECT_S = 30.0
KEEPALIVE_S = 60.0
"""Shorter than the 75 s after which the gateway closes idle connections, so that no call meets one that is closing."""


class ConnectionPool:
    """Shared HTTP clients. They set no cap on connections: the worker bounds concurrency.

    trust_env: follow the environment's proxy variables. The gateway is never behind one.
    """

    def __init__(self, *, trust_env: bool = False) -> None:
        self._trust_env = trust_env
        self._async_clients: dict[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[None, None]]] = {}
        self._sync_client: Any = None
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def async_client(self) -> Any:
        """The client of the running event loop, fit for `AsyncOpenAI(http_client=…)`; closed with that loop."""
        loop = asyncio.get_running_loop()
        entry = self._async_clients.get(loop)
        if entry is None:
            for closed in [known for known in list(self._async_clients) if known.is_closed()]:
                self._async_clients.pop(closed, None)
            client = self._new_async_client()
            entry = self._async_clients[loop] = (client, self._close_with(loop, client))
        return entry[0]

    def sync_client(self) -> Any:
        """The client for all threads, fit for `OpenAI(http_client=…)`."""
        with self._lock:
            if self._sync_client is None:
                library = _library()
                self._sync_client = library.Client(**self._options(library, cap=None))
            return self._sync_client

    def close(self) -> None:
        """Close the client of the threads; those of event loops close with their loop."""
        with self._lock:
            if self._sync_client is not None:
                self._sync_client.close()
                self._sync_client = None

    def _new_async_client(self) -> Any:
        library = _library()
        if importlib.util.find_spec("openai") is None:
            return library.AsyncClient(**self._options(library, cap=None))
        openai = importlib.import_module("openai")
        try:
            # 1.35 ms of CPU per call against 2.2 ms with plain httpx. Its transport reads a cap of None as aiohttp's 100.
            return openai.DefaultAioHttpClient(**self._options(library, cap=0))
        except RuntimeError:  # how the SDK says that its aiohttp extra is absent
            return openai.DefaultAsyncHttpxClient(**self._options(library, cap=None))

    def _options(self, library: Any, cap: int | None) -> dict[str, Any]:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return {
            "limits": library.Limits(max_connections=cap, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S),
            "timeout": library.Timeout(TIMEOUT_S, connect=CONNECT_S),
            "trust_env": self._trust_env,
            "verify": self._tls,
            "follow_redirects": True,
        }

    def _close_with(self, loop: asyncio.AbstractEventLoop, client: Any) -> AsyncGenerator[None, None]:
        """Close `client` when `loop` shuts its asynchronous generators down, as asyncio.run does: agents call that too."""

        async def until_shutdown() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                self._async_clients.pop(loop, None)
                await client.aclose()

        generator = until_shutdown()
        try:
            generator.asend(None).send(None)  # runs to the yield, which registers the generator with its loop
        except StopIteration:
            return generator
        raise AssertionError("the generator yields at its first step")


def _library() -> Any:
    """httpx2, which openai from 3.0 asks for, where it is installed; else httpx."""
    return importlib.import_module("httpx2" if importlib.util.find_spec("httpx2") else "httpx")
