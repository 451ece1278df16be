"""Where the store of benchmarks/chaos.py is: in a file, behind a server of ours, in a database; and how each is killed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import psutil

STORE_AWAY_S = 1.0


class Place(Protocol):
    """A store and the server that keeps it, if it has one."""

    url: str
    """What the trainer is told."""
    record: str
    """What reads the store at the end."""
    roles: tuple[str, ...]

    def kill(self) -> None:
        """SIGKILL for the store's server, which is back when this returns."""

    def processes(self) -> list[psutil.Process]:
        """The store's server, parents first; none where it has none."""


class _File:
    """A SQLite file that the trainer's own server owns."""

    roles = ("server", "worker")

    def __init__(self, folder: Path) -> None:
        self.url = self.record = f"sqlite:///{folder}/agl.db"

    def kill(self) -> None:
        raise NotImplementedError("a file has no server of its own")

    def processes(self) -> list[psutil.Process]:
        return []


class _Served(_File):
    """A SQLite file behind ``agl serve``."""

    roles = ("store", "worker")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
        self._folder = folder
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        with (self._folder / "serve.log").open("ab") as log:
            self.process = start_agl(self._folder, log, "serve", "--store", self.record, "--port", str(self._port))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        time.sleep(STORE_AWAY_S)
        self.start()

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid)]


class _Database:
    """A database server; the trainer's own server is a client of it."""

    roles = ("server", "worker", "store")

    def __init__(self, server: Any, url: str) -> None:
        self._server = server
        self.url = self.record = url

    def kill(self) -> None:
        self._server.kill()
        time.sleep(STORE_AWAY_S)
        self._server.start()

    def processes(self) -> list[psutil.Process]:
        server = psutil.Process(self._server.pid)
        return [server, *server.children(recursive=True)]


@contextlib.contextmanager
def at_file(folder: Path) -> Iterator[Place]:
    yield _File(folder)


@contextlib.contextmanager
def at_server(folder: Path) -> Iterator[Place]:
    served = _Served(folder)
    try:
        yield served
    finally:
        served.process.kill()
        served.process.wait()


@contextlib.contextmanager
def at_postgres(folder: Path) -> Iterator[Place]:
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "store"))
    from postgres_server import PostgresServer

    with PostgresServer() as server:
        yield _Database(server, server.url())


@contextlib.contextmanager
def at_redis(folder: Path) -> Iterator[Place]:
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "store"))
    from redis_server import RedisServer

    with RedisServer() as server:
        yield _Database(server, server.url("chaos"))


PLACES: dict[str, Callable[[Path], AbstractContextManager[Place]]] = {
    "sqlite": at_file,
    "http": at_server,
    "postgres": at_postgres,
    "redis": at_redis,
}


def start_agl(folder: Path, output: Any, *arguments: str) -> subprocess.Popen[bytes]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
    return subprocess.Popen(
        [sys.executable, "-m", "agentlightning", *arguments],
        cwd=folder,
        env={**plain, "COLUMNS": "240"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
