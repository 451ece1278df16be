"""The services of a generated compose.yaml as plain processes, with the commands and environments of the file.

Names of hosts become this machine's address, and ports free ones; everything else is taken as it stands there.
"""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from command_line import Folder, until
from reserved_place import reserved_place

STOP_S = 120.0
DEADLINE_S = 250.0
"""Matters only where a test fails: the slowest machine has its time."""
PORTS = ("8088", "8089", "9000", "7860")
HOSTS = ("server", "trainer")


class Composition:
    """The file's services, each started, stopped and killed by its name."""

    def __init__(self, folder: Path, database: str) -> None:
        """folder: with compose.yaml, inside the project. database: URL in place of the service postgres."""
        self.project = Folder(folder.parent)
        self._folder = folder
        self._services: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
        self._places = [reserved_place() for _ in PORTS]
        self.ports = {port: str(place.getsockname()[1]) for port, place in zip(PORTS, self._places, strict=True)}
        self._database = database
        self.secrets = {name: secrets.token_hex(12) for name in ("POSTGRES_PASSWORD", "AGL_SERVER_KEY", "SAMPLER_KEY")}
        keys = self._here((folder / "keys.toml").read_text())
        (folder / "keys-here.toml").write_text(keys)
        self.running: dict[str, subprocess.Popen[str]] = {}

    @property
    def url(self) -> str:
        """Of the server."""
        return f"http://127.0.0.1:{self.ports['8088']}"

    def command(self, service: str) -> list[str]:
        """The words of a service's command, as they are for this machine."""
        words = [self._here(word.replace("$$", "$")) for word in self._services[service]["command"]]
        return [str(self._folder / "keys-here.toml") if word.endswith("/keys.toml") else word for word in words]

    def environment(self, service: str) -> dict[str, str]:
        """The variables of a service; ${NAME…} is taken from the secrets, as Compose takes it from .env."""
        found = {}
        for name, value in self._services[service]["environment"].items():
            known = re.sub(r"\$\{(\w+)[^}]*\}", lambda match: self.secrets.get(match[1], ""), str(value))
            found[name] = self._database if known.startswith("postgresql://") else known
        return found

    def start(self, service: str, name: str | None = None) -> subprocess.Popen[str]:
        """Start a service; `name` tells several of one service from each other."""
        words = self.command(service)
        assert words[0] == "agl"
        with (self._folder / f"{name or service}.log").open("ab") as log:
            process = self.project.start(
                *words[1:], env=self.environment(service), stdout=log, stderr=subprocess.STDOUT
            )
        self.running[name or service] = process
        return process

    def restart(self, service: str, name: str | None = None, *, kill: bool = False) -> subprocess.Popen[str]:
        """End a service by SIGTERM, as `docker compose restart` does, or at once, and start it again."""
        process = self.running[name or service]
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        process.wait(STOP_S)
        return self.start(service, name)

    def log(self, name: str) -> str:
        """What a service printed."""
        return (self._folder / f"{name}.log").read_text()

    def token(self, name: str, role: str, *options: str) -> bool:
        """What start.sh does: has the server make a token, for ${NAME} of the file; False where it refuses."""
        env = {"AGL_SERVER_KEY": self.secrets["AGL_SERVER_KEY"]}
        made = self.project.run("tokens", "create", "--role", role, *options, "--server", self.url, env=env)
        self.secrets[name] = made.stdout.strip()
        return made.returncode == 0

    def until(self, condition: Any, what: str) -> None:
        """Wait for a condition; fails with what the services printed."""
        try:
            until(condition, what, DEADLINE_S)
        except AssertionError as late:
            logs = "\n".join(f"--- {name}\n{self.log(name)[-1500:]}" for name in self.running)
            raise AssertionError(f"{late}\n{logs}") from late

    def close(self) -> None:
        """End everything."""
        self.project.close()
        for place in self._places:
            place.close()

    def _here(self, text: str) -> str:
        for host in HOSTS:
            text = re.sub(rf"\b{host}:(?=\d)", "127.0.0.1:", text)
        for port, free in self.ports.items():
            text = re.sub(rf"\b{port}\b", free, text)
        return str(self._folder.parent / "runs") if text == "/runs" else text


def metric(text: str, name: str) -> Mapping[str, float]:
    """Values of a metric by its labels, of a text as /metrics has it."""
    lines = (line.rpartition(" ") for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))
    return {labels: float(value) for labels, _, value in lines}
