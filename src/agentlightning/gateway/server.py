"""AgentLightningServer: the gateway and the store in a thread of this process, for scripts, notebooks and tests.

``agl serve`` and the trainer run the same application as a process of its own; that is what survives a kill.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Self

from agentlightning.errors import GatewayError
from agentlightning.gateway.app import App
from agentlightning.gateway.external_keys import external_keys as build_external_keys
from agentlightning.gateway.external_keys import pairs_of
from agentlightning.gateway.server_settings import ServerSettings
from agentlightning.gateway.uvicorn_server import UvicornServer
from agentlightning.runtime.children import listen
from agentlightning.store.open import open_store
from agentlightning.store.server_keys import ServerLock, is_loopback

START_TIMEOUT_S = 30.0


class AgentLightningServer:
    """A server as a context manager; `url` is where it listens.

    >>> with AgentLightningServer("memory://") as server:  # doctest: +SKIP
    ...     store = LightningStoreClient(server.url)
    """

    def __init__(
        self,
        store: str = "memory://",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        server_key: str | None = None,
        external_keys: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`store` is a store URL; port 0 takes a free one; `server_key` guards /api: GatewayError where
        `host` is reachable from elsewhere and there is none. Without one, everybody on this machine may do everything.
        `external_keys`: by variable of this process, the hosts to which its value may be sent."""
        if server_key is None and not is_loopback(host):
            raise GatewayError(f"server_key: is required, because {host} is reachable from elsewhere")
        self._store_url = store
        self._server_key = server_key
        self._settings = ServerSettings(external_keys=build_external_keys(pairs_of(external_keys or {})))
        self._address = (host, port)
        self._server: UvicornServer | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.url = ""

    def start(self) -> Self:
        """Listen, and return once requests are answered. GatewayError where the port is in use."""
        host, port = self._address
        try:
            listener = listen(host, port)
        except OSError as cause:
            raise GatewayError(f"port {port} of {host} cannot be used: {cause.strerror}; choose another") from cause
        started = threading.Event()

        def run() -> None:
            try:
                asyncio.run(self._serve(listener, started))
            except BaseException as failure:
                self._failure = failure
            finally:
                listener.close()
                started.set()

        self._thread = threading.Thread(target=run, name="agentlightning-server", daemon=True)
        self._thread.start()
        if not started.wait(START_TIMEOUT_S):
            raise GatewayError(f"the server did not start within {START_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise self._failure
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        return self

    def stop(self) -> None:
        """Finish what was accepted and end; a second call does nothing."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
            self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _serve(self, listener: socket.socket, started: threading.Event) -> None:
        with ServerLock(self._store_url) as lock:
            async with open_store(self._store_url, self._server_key) as store:
                app = App(store, self._server_key, settings=self._settings, on_stop=lock.ending)
                self._server = UvicornServer(app, started=started.set)
                await self._server.serve(sockets=[listener])
