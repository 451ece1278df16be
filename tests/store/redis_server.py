"""A real redis-server for tests and benchmarks: append-only, on a free loopback port, with data that survive `kill`."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from reserved_place import reserved_place

START_S = 30.0


def missing() -> str | None:
    """Why there can be no server here; None where there can."""
    return None if shutil.which("redis-server") else "redis-server is not installed: make servers"


class RedisServer:
    """One redis-server. `start` returns when it serves; after `kill` (SIGKILL) or `stop`, `start` serves the same data."""

    def __init__(self, *options: str, password: str = "secret", dump: Path | None = None) -> None:
        """`dump`: an RDB file whose data it begins with."""
        self._options = options
        self._password = password
        self._folder = Path(tempfile.mkdtemp(prefix="agl-redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._place = reserved_place()
        self.port = int(self._place.getsockname()[1])
        if dump is not None:
            shutil.copyfile(dump, self._folder / "dump.rdb")

    def url(self, prefix: str | None = None, **options: str) -> str:
        """The URL of a store of its own in this server."""
        prefix = prefix or secrets.token_hex(8)
        given = "".join(f"&{name}={value}" for name, value in options.items())
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0?prefix={prefix}{given}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def start(self) -> None:
        # A server with an append-only file would not read the dump.
        from_dump = not (self._folder / "appendonlydir").exists() and (self._folder / "dump.rdb").exists()
        self._process = subprocess.Popen(
            [
                *("redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder)),
                *("--requirepass", self._password, "--save", ""),
                *("--appendonly", "no" if from_dump else "yes", "--appendfsync", "always"),
                *("--logfile", str(self._folder / "log"), *self._options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            restore_signals=False,  # a file that may not grow is an error then, as on a full disk, and not a signal
        )
        deadline = time.monotonic() + START_S
        while self._ask("PING") != b"+PONG":
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server does not start: {self.log[-2000:]}")
            time.sleep(0.01)
        if from_dump:
            self._ask("CONFIG SET appendonly yes")

    def kill(self) -> None:
        """SIGKILL, at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End the server and remove its data.

        SIGKILL, for a replica that writes its first append-only file refuses SIGTERM and forgets it.
        """
        self.kill()
        self._place.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ask(self, command: str) -> bytes:
        """What the server answers; empty where it does not yet, -LOADING while it reads its file."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(f"AUTH {self._password}\r\n{command}\r\n".encode())
                answers = connection.makefile("rb")
                answers.readline()
                return answers.readline().strip()
        except OSError:
            return b""
