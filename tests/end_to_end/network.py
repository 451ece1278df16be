"""Hosts on one machine: Linux network namespaces on a bridge, whose cables a test can pull."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

START = ("ip", "netns", "exec")
HIDE = ("sh", "-c", 'for _ in $(seq $1); do mount -t tmpfs tmpfs "$2" || exit; shift; done; shift; exec "$@"', "hide")
"""``ip netns exec`` gives a process mounts of its own. Arguments: how many folders, the folders, the command."""
WRONG_CLOCK = """
import runpy, sys, time

shift_s, module = float(sys.argv[1]), sys.argv[2]
right, right_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: right() + shift_s, lambda: right_ns() + int(shift_s * 1e9)
del sys.argv[:2]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""A clock is wrong for one process only so: Linux has no namespace for it, and libfaketime breaks sleeping."""


def missing() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"agl-probe-{secrets.token_hex(2)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


class Network:
    """A bridge with this machine (at `address`) and hosts on it, each in a network namespace of its own."""

    def __init__(self) -> None:
        token = secrets.token_bytes(3)
        self._token = token.hex()
        self._subnet = f"10.{token[0]}.{token[1]}"
        self.address = f"{self._subnet}.1"
        self._hosts: list[Host] = []

    def __enter__(self) -> Self:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("address", "add", f"{self.address}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.close()
        _ip("link", "del", self.bridge)

    @property
    def bridge(self) -> str:
        return f"aglb{self._token}"

    def host(self, name: str, folder: Path, hidden: Sequence[Path] | None = None) -> Host:
        """A new host; what is started on it works in `folder` and logs there.

        hidden: folders that it does not see; given, it has a shared memory of its own, too.
        """
        number = len(self._hosts) + 2
        space, cable = f"agl-{self._token}-{name}", f"agl{self._token}{number}"
        made = Host(name, space, f"{self._subnet}.{number}", cable, folder, hidden)
        self._hosts.append(made)
        made.connect(self.bridge)
        return made


class Host:
    """A network namespace with one cable to the bridge."""

    def __init__(
        self, name: str, space: str, address: str, cable: str, folder: Path, hidden: Sequence[Path] | None = None
    ) -> None:
        self.name = name
        self.address = address
        self.clock_s = 0.0
        """By how much the clock of what is started here is ahead, in seconds."""
        self._space = space
        self._cable = cable
        self._folder = folder
        self._hidden = [] if hidden is None else ["/dev/shm", *map(str, hidden)]
        self._started: list[subprocess.Popen[bytes]] = []

    def connect(self, bridge: str) -> None:
        _ip("netns", "add", self._space)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        _ip("link", "set", self._cable, "master", bridge)
        self.up()
        _ip("-n", self._space, "address", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self._space, "link", "set", "eth0", "up")
        _ip("-n", self._space, "link", "set", "lo", "up")

    def up(self) -> None:
        """Plug the cable in."""
        _ip("link", "set", self._cable, "up")

    def down(self) -> None:
        """Pull the cable: packets are lost, nobody is told."""
        _ip("link", "set", self._cable, "down")

    def start(
        self, module: str, *arguments: str, program: str = sys.executable, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start ``program -m module arguments…`` on this host."""
        python = ["-m", module] if not self.clock_s else ["-c", WRONG_CLOCK, str(self.clock_s), module]
        plain: dict[str, Any] = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
        with self.log.open("ab") as log:
            started = subprocess.Popen(
                [
                    *START,
                    self._space,
                    *HIDE,
                    str(len(self._hidden)),
                    *self._hidden,
                    program,
                    *python,
                    *arguments,
                ],
                cwd=self._folder,
                env={**plain, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._started.append(started)
        return started

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    def close(self) -> None:
        for started in self._started:
            started.kill()
            started.wait()
        _ip("netns", "del", self._space)  # its end of the cable goes with it, and so does ours


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
