"""The way out of a sandbox: a Unix socket whose connections lead to the server, and nowhere else.

The worker holds it for one attempt; the relay inside connects to it. What goes through is not looked at: the server checks
the attempt's key as for everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError

MAX_CONNECTIONS = 64
"""At a time, of one attempt: an agent cannot use up the worker's descriptors. Further ones wait."""
CHUNK_BYTES = 64 * 1024
CONNECT_TIMEOUT_S = 30.0
FULL_PAUSE_S = 0.2
"""Before the next try where the worker has no descriptor left."""
UNPRIVILEGED_PORT = 1024
OTHER_PORT = 8765
"""Inside, in place of a port that only a privileged user may listen on."""


class ServerAddress:
    """The server as the worker reaches it, and the URL by which a sandbox does."""

    def __init__(self, url: str) -> None:
        """ConfigError where no certificate could be right for the address inside."""
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.inner_port = self.port if self.port >= UNPRIVILEGED_PORT else OTHER_PORT
        numeric = ":" in self.host or self.host.replace(".", "").isdigit()
        if numeric and parts.scheme == "https":
            raise ConfigError(f"--server: a sandbox reaches an https server by its name only, got {url}")
        self.name = "" if numeric else self.host
        """Name of the server; empty where it has none."""
        self.inner_url = f"{parts.scheme}://{self.name or '127.0.0.1'}:{self.inner_port}{parts.path.rstrip('/')}"


class GatewaySocket:
    """Listens at a path while it is entered."""

    def __init__(self, path: Path, address: ServerAddress) -> None:
        self._path = path
        self._address = address
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(self._path))
            os.chmod(
                self._path, 0o777
            )  # the user inside may be another one; the folder around it is the worker's alone
            self._listener.listen(MAX_CONNECTIONS)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        self._keep(asyncio.create_task(self._accept()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (tasks := set(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._places.acquire()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:
                self._places.release()
                await asyncio.sleep(FULL_PAUSE_S)
                continue
            carrying = asyncio.create_task(self._carry(connection))
            carrying.add_done_callback(partial(_released, connection, self._places))  # also of one that never began
            self._keep(carrying)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, connection: socket.socket) -> None:
        ends: list[asyncio.StreamWriter] = []
        try:
            inner, to_inner = await asyncio.open_unix_connection(sock=connection)
            ends.append(to_inner)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                outer, to_outer = await asyncio.open_connection(self._address.host, self._address.port)
            ends.append(to_outer)
            await asyncio.gather(_copy(inner, to_outer), _copy(outer, to_inner))
        except (OSError, TimeoutError):
            pass  # a server that is away: the agent sees a connection that closes, as it would outside
        finally:
            for end in ends:
                end.transport.abort()


def _released(connection: socket.socket, places: asyncio.Semaphore, _: asyncio.Task[None]) -> None:
    connection.close()
    places.release()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK_BYTES):
        target.write(data)
        await target.drain()
    with contextlib.suppress(OSError):
        target.write_eof()
