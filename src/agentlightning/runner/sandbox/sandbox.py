"""Sandbox: makes a sandbox for each attempt of a command agent, and refuses what cannot be isolated here.

Driven by the command runner, and by the trainer before anything starts. What an agent sees inside is what it sees outside:
task, base URL, key, reward URL, exit codes. A sandbox's own are its files, its processes and its network.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.config.base import parse_settings
from agentlightning.config.sandbox import SandboxConfig
from agentlightning.errors import AgentError, ConfigError
from agentlightning.runner.agent import LLM
from agentlightning.runner.sandbox.filesystem import HOME, INSIDE, etc_files, view_of
from agentlightning.runner.sandbox.gateway_socket import GatewaySocket, ServerAddress
from agentlightning.runner.sandbox.kinds import MEGABYTE, Box, kind_of
from agentlightning.runner.sandbox.limits import Cgroup, Cgroups, rlimits
from agentlightning.store.server_keys import find_key_file
from agentlightning.store.sqlite_file import sqlite_file

PROBE_TIMEOUT_S = 120.0
"""For one empty sandbox; a container's image may have to be fetched."""
MAX_SAID = 500
"""Characters of what a sandbox that cannot be run says, told as the reason."""
INHERITED = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "PATH")
"""Variables of the worker that an agent gets."""
JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
"""A shell joins the control groups given before ``--`` and becomes what comes after it."""
FORBIDDING = {
    "kernel.unprivileged_userns_clone": "0",
    "user.max_user_namespaces": "0",
    "kernel.apparmor_restrict_unprivileged_userns": "1",
}
"""Settings of Linux that keep users from making user namespaces, and with which value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSandbox:
    """A sandbox that is ready to be started."""

    command: list[str]
    environment: dict[str, str]
    stdin: int
    """Read by the relay."""
    control: int
    """A byte has the program told to end; closing it ends the sandbox."""
    group: Cgroup | None

    def interrupt(self) -> None:
        """Have the program told to end."""
        # An agent may have filled the pipe, or keep the relay from reading it: it is killed later, as one that goes on.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self.control, b"T")

    def explain(self) -> str:
        """Says why the program may have been killed; empty where nothing is known."""
        return "; it reached sandbox.memory_mb" if self.group is not None and self.group.ran_out_of_memory() else ""


class Sandbox:
    """The sandboxes of one worker. ConfigError where its settings cannot be met here; `check` tries."""

    def __init__(
        self,
        settings: SandboxConfig,
        program: str,
        *,
        server_url: str = "http://127.0.0.1:8765",
        hidden: Sequence[Path] = (),
    ) -> None:
        """program: what the command runs; hidden: folders that no agent may read."""
        self._settings = settings
        self._kind = kind_of(settings.kind)
        self._address = ServerAddress(server_url)
        if shutil.which(self._kind.program) is None:
            raise ConfigError(
                f"sandbox.kind: {settings.kind!r} needs the program {self._kind.program!r}, which is not found on PATH"
            )
        self._view = view_of(settings.readable, hidden, program=program if self._kind.own_root else None)
        self._groups = Cgroups(()) if self._kind.limits_itself else Cgroups()
        self._groups.sweep()
        alone = not (self._groups or self._kind.limits_itself)
        if alone and (self._kind.needs_group or os.geteuid() == 0):
            raise ConfigError(
                "sandbox: memory and processes cannot be limited here: no control group with the controllers memory and "
                "pids can be made, and other limits bound neither root nor gVisor; hand the worker a control group "
                "(systemd: Delegate=yes), or run it as another user with kind = 'bubblewrap'"
            )
        self._rlimits = rlimits(settings.memory_mb * MEGABYTE, settings.processes) if alone else ""

    def __str__(self) -> str:
        if self._kind.limits_itself:
            limited = f"limited by {self._kind.program}"
        else:
            limited = "limited by a control group" if self._groups else "limited for each process, by no control group"
        return f"{self._settings.kind}, {limited}"

    def check(self) -> None:
        """Run an empty sandbox. ConfigError where it cannot be. Blocks."""
        with tempfile.TemporaryDirectory(prefix="agl-sandbox-") as folder:
            box = self._box(Path(folder), {"PATH": os.environ.get("PATH", os.defpath)}, [])
            group = self._group(box)
            command = _joined(group, self._kind.command(box))
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    timeout=PROBE_TIMEOUT_S,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    env=self._environment(box),
                )
            except (OSError, subprocess.TimeoutExpired) as cause:
                raise ConfigError(f"sandbox.kind: {self._settings.kind} cannot be run here: {cause}") from cause
            finally:
                self._kind.end(box)
                if group is not None:
                    group.remove()
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").split("\n")
            why = (
                "; ".join(filter(None, map(str.strip, said)))[-MAX_SAID:]
                or f"it ended with exit code {done.returncode}"
            )
            raise ConfigError(f"sandbox.kind: {self._settings.kind} cannot be run here: {why}{_hint()}")

    def inside(self, llm: LLM) -> LLM:
        """The model as it is reached from inside."""
        outer = llm.anthropic_base_url
        path = outer[outer.index("/r/") :]
        root = f"{self._address.inner_url}{path}"
        return dataclasses.replace(llm, base_url=f"{root}/v1", anthropic_base_url=root)

    @property
    def task_file(self) -> Path:
        """Path of the task inside."""
        return Path(INSIDE) / "task.json"

    @property
    def inherited(self) -> dict[str, str]:
        """Variables of the worker that an agent gets; an image has a PATH of its own."""
        kept = INHERITED if self._kind.own_root else INHERITED[:-1]
        return {name: os.environ[name] for name in kept if name in os.environ}

    @asynccontextmanager
    async def open(
        self, folder: Path, task: str, arguments: Sequence[str], environment: Mapping[str, str], mark: Mapping[str, str]
    ) -> AsyncIterator[OpenSandbox]:
        """A sandbox in an empty folder of the worker's; nothing of it is left afterwards.

        environment: what the program gets, with HOME added; mark: variables by which this machine finds the processes.
        """
        box = self._box(folder, {**environment, "HOME": HOME}, arguments)
        (box.shared / "task.json").write_text(task, encoding="utf-8")
        async with GatewaySocket(box.shared / "gateway.sock", self._address):
            read, write = os.pipe()
            os.set_blocking(write, False)  # whoever runs inside can open the other end as well
            making = asyncio.get_running_loop().run_in_executor(None, self._group, box)
            try:
                group = await asyncio.shield(making)  # a thread that has begun makes it, though this is cancelled
                yield OpenSandbox(
                    command=_joined(group, self._kind.command(box)),
                    environment={**self._environment(box), **mark},
                    stdin=read,
                    control=write,
                    group=group,
                )
            finally:
                os.close(write)
                os.close(read)
                await asyncio.to_thread(self._end, box, await making)

    def _environment(self, box: Box) -> dict[str, str]:
        """Returns that of the program that makes the sandbox; one that makes containers has settings of its own in the
        worker's."""
        if self._kind.own_root:
            return dict(box.environment)
        return {**os.environ, **{name: value for name, value in box.environment.items() if name != "HOME"}}

    def _end(self, box: Box, group: Cgroup | None) -> None:
        self._kind.end(box)
        if group is not None:
            group.remove()

    def _group(self, box: Box) -> Cgroup | None:
        if not self._groups:
            return None
        try:
            return self._groups.make(box.name, self._settings.memory_mb * MEGABYTE, self._settings.processes)
        except OSError as cause:
            raise AgentError(f"sandbox: no control group can be made any more: {cause}") from cause

    def _box(self, folder: Path, environment: Mapping[str, str], arguments: Sequence[str]) -> Box:
        """Its folder is laid out: what is shared with whoever runs inside, and /etc."""
        name = f"agl-{secrets.token_hex(8)}"
        relay = [f"{INSIDE}/relay.py", str(self._address.inner_port), f"{INSIDE}/gateway.sock", self._rlimits]
        box = Box(
            name=name,
            folder=folder,
            view=self._view,
            settings=self._settings,
            cwd=os.getcwd(),
            relay=[*relay, *arguments],
            environment=environment,
        )
        box.shared.mkdir(mode=0o755)
        box.shared.chmod(0o755)  # whatever the umask: `folder` itself is closed to others
        box.etc.mkdir()
        shutil.copyfile(Path(__file__).with_name("relay.py"), box.shared / "relay.py")
        for file, text in etc_files(self._address.name).items():
            (box.etc / file).write_text(text, encoding="utf-8")
        for path in (*box.shared.iterdir(), *box.etc.iterdir()):
            path.chmod(0o644)
        return box


def sandbox_of_run(config: Mapping[str, Any]) -> SandboxConfig | None:
    """The sandbox that a run's configuration in the store asks for, so that workers anywhere do alike."""
    table = config.get("sandbox")
    return parse_settings(SandboxConfig, table, "sandbox", ".") if isinstance(table, dict) else None


def store_folders(config: Mapping[str, Any], server_url: str | None) -> list[Path]:
    """The folders of a run's SQLite store and of the key of its server, where they are on this machine."""
    table = config.get("store")
    url = str(table.get("url", "")) if isinstance(table, dict) else ""
    store = sqlite_file(url)
    files = [] if store is None else [store.absolute()]
    if server_url is not None and (key := find_key_file(server_url)) is not None:
        files.append(key)
    return [file.parent for file in files]


def _joined(group: Cgroup | None, command: list[str]) -> list[str]:
    return command if group is None else ["/bin/sh", "-c", JOIN, "agl-sandbox", *group.entries, "--", *command]


def _hint() -> str:
    """Names the setting of this machine that forbids user namespaces, where one does."""
    for name, value in FORBIDDING.items():
        file = Path("/proc/sys") / name.replace(".", "/")
        with contextlib.suppress(OSError):
            if file.read_text().strip() == value:
                return f"; user namespaces are not permitted here: sysctl {name} is {value}"
    return ""
