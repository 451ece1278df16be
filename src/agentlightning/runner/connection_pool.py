"""HTTP clients that every agent of a process shares: one pool for each event loop, one for all threads.

Building an SDK client costs 16 ms of CPU without a shared HTTP client, nearly all of it TLS set-up, and a new connection for
each rollout on top. A client is of the library that the installed SDK stands on, httpx for older releases of openai and
anthropic, httpx2 for newer ones: neither takes a client of the other. Driven by `LLM`; knows nothing of rollouts. Imports
SDKs and HTTP libraries only when a client is asked for.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import ssl
import threading
from collections.abc import AsyncGenerator, Iterator
from types import ModuleType
from typing import Any, Literal

Sdk = Literal["openai", "anthropic"]
SDKS: tuple[Sdk, ...] = ("openai", "anthropic")
"""In the order in which they decide, where a client is asked for without naming one."""

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
        self._async_clients: dict[tuple[asyncio.AbstractEventLoop, str], tuple[Any, AsyncGenerator[None, None]]] = {}
        self._sync_clients: dict[str, Any] = {}
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def async_client(self, sdk: Sdk | None = None) -> Any:
        """The client of the running event loop, fit for `AsyncOpenAI(http_client=…)`; closed with that loop.

        sdk: whose client it is for; None: openai where it is installed, else anthropic.
        """
        loop = asyncio.get_running_loop()
        library = http_library(sdk)
        entry = self._async_clients.get((loop, library))
        if entry is None:
            for closed in [known for known in list(self._async_clients) if known[0].is_closed()]:
                self._async_clients.pop(closed, None)
            client = self._new_async_client(library)
            entry = self._async_clients[loop, library] = (client, self._close_with(loop, library, client))
        return entry[0]

    def sync_client(self, sdk: Sdk | None = None) -> Any:
        """The client for all threads, fit for `OpenAI(http_client=…)`."""
        library = http_library(sdk)
        with self._lock:
            if library not in self._sync_clients:
                module = importlib.import_module(library)
                self._sync_clients[library] = module.Client(**self._options(module, cap=None))
            return self._sync_clients[library]

    def close(self) -> None:
        """Close the clients of the threads; those of event loops close with their loop."""
        with self._lock:
            while self._sync_clients:
                self._sync_clients.popitem()[1].close()

    def _new_async_client(self, library: str) -> Any:
        module = importlib.import_module(library)
        for sdk in SDKS:
            package = _installed(sdk)
            if package is None or library_of(package) != library:
                continue
            try:
                # 1.35 ms of CPU per call against 2.2 ms with plain httpx. Its transport reads None as aiohttp's 100.
                return package.DefaultAioHttpClient(**self._options(module, cap=0))
            except (RuntimeError, AttributeError):  # the aiohttp extra is absent, or the SDK too old to have one
                continue
        return module.AsyncClient(**self._options(module, cap=None))

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

    def _close_with(self, loop: asyncio.AbstractEventLoop, library: str, client: Any) -> AsyncGenerator[None, None]:
        """Close `client` when `loop` shuts its asynchronous generators down, as asyncio.run does: agents call that too."""

        async def until_shutdown() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                self._async_clients.pop((loop, library), None)
                await client.aclose()

        generator = until_shutdown()
        try:
            generator.asend(None).send(None)  # runs to the yield, which registers the generator with its loop
        except StopIteration:
            return generator
        raise AssertionError("the generator yields at its first step")


def http_library(sdk: Sdk | None = None) -> str:
    """The HTTP library that the installed SDK stands on, "httpx" or "httpx2"; without an SDK the newer one."""
    for name in SDKS if sdk is None else (sdk,):
        package = _installed(name)
        if package is not None:
            return library_of(package)
    return "httpx2" if importlib.util.find_spec("httpx2") else "httpx"


def _installed(sdk: Sdk) -> ModuleType | None:
    try:
        return importlib.import_module(sdk)
    except ModuleNotFoundError:
        return None


def library_of(package: Any) -> str:
    """The library whose client the SDK's own is a subclass of: its first base that is not the SDK's."""
    kinds: Iterator[str] = (kind.__module__.partition(".")[0] for kind in package.DefaultAsyncHttpxClient.__mro__)
    return next(name for name in kinds if name in ("httpx", "httpx2"))
