"""A server as a process of its own on a free port, and what it wrote."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_S = 100.0


@dataclass
class ServerProcess:
    """``python -m agentlightning.gateway`` over a store."""

    store: str
    log: Path
    key: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    url: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self, host: str = "127.0.0.1") -> ServerProcess:
        """Start it and wait until it answers."""
        with socket.socket() as place:  # bound, not listening: until the server has the port nobody else is given it
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind((host, 0))
            return self._start(host, place.getsockname()[1])

    def _start(self, host: str, port: int) -> ServerProcess:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
        environment["XDG_STATE_HOME"] = str(self.log.parent / "state")
        if self.key is not None:
            environment["AGL_SERVER_KEY"] = self.key
        arguments = ["agentlightning.gateway", "--store", self.store, "--host", host, "--port", str(port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments], stdout=log, stderr=log, env={**environment, **self.environment}
            )
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while True:
            try:
                httpx.get(f"{self.url}/healthz", timeout=5)
                return self
            except httpx.TransportError:
                assert self.process.poll() is None, self.said()
                assert time.monotonic() < deadline, self.said()
                time.sleep(0.05)

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, within_s: float = 60) -> int:
        """Wait until it ends; its exit code."""
        assert self.process is not None
        return self.process.wait(within_s)

    def said(self) -> str:
        """Everything that it wrote."""
        return self.log.read_text(encoding="utf-8")

    def close(self) -> None:
        """Kill it if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
