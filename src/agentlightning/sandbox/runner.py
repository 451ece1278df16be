"""Sandboxes of a worker: one for each attempt of a command agent; what cannot be isolated here is refused.

Driven by `runner.sandboxes`, which loads it by name. What an agent sees inside is what it sees outside: task, base URL, key,
reward URL, exit codes. A sandbox's own are its files, its processes and its network.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentlightning.config.agent import Bubblewrap, Container
from agentlightning.errors import AgentError, ConfigError
from agentlightning.records import Claim
from agentlightning.runner.agent import LLM
from agentlightning.runner.command import CommandRunner, Program, command_environment
from agentlightning.runner.sandboxes import CommandAgent, StartedRunner
from agentlightning.sandbox.gateway_socket import GatewaySocket, ServerAddress
from agentlightning.sandbox.kinds import (
    HOME,
    INSIDE,
    MAX_PROCESSES,
    MEGABYTE,
    Box,
    bubblewrap_command,
    container_command,
    container_program,
    end_container,
    etc_files,
    view_of,
)
from agentlightning.sandbox.limits import Cgroup, Cgroups, rlimits
from agentlightning.store.base import LightningStore

PROBE_TIMEOUT_S = 120.0
"""For one empty sandbox; a container's image may have to be fetched."""
MAX_SAID = 500
"""Characters of what a sandbox that cannot be run says, told as the reason."""
MAX_EXIT_CODE = 128
"""Of a program that no signal ended, as shells tell it."""
INHERITED = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "PATH")
"""Variables of the worker that an agent gets."""
JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
"""A shell joins the control groups given before ``--`` and becomes what comes after it."""


async def start_runner(agent: CommandAgent, store: LightningStore) -> StartedRunner:
    """The runner of a command agent whose attempts have sandboxes. ConfigError where they cannot be had here."""
    runner = SandboxRunner(agent)
    await asyncio.to_thread(runner.check)
    return StartedRunner(runner=runner)


def check(agent: CommandAgent) -> str:
    """Try an empty sandbox, and describe it. ConfigError where it cannot be had here. Blocks."""
    runner = SandboxRunner(agent)
    runner.check()
    return f"sandbox: {runner}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SandboxedProgram(Program):
    """A program whose relay reads `stdin`."""

    control: int
    """A byte has the program told to end; closing it ends the sandbox."""
    group: Cgroup | None

    def interrupt(self, group: int) -> bool:
        """Have the program told to end: the first process of a sandbox would take the others with it."""
        # An agent may have filled the pipe, or keep the relay from reading it: it is killed later, as one that goes on.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self.control, b"T")
        return True

    def exit_code(self, code: int) -> int:
        """The exit code, in which a sandbox tells a signal as shells do."""
        return MAX_EXIT_CODE - code if code > MAX_EXIT_CODE else code

    def explain(self) -> str:
        """Says why the program may have been killed; empty where nothing is known."""
        return "; it reached sandbox.memory_mb" if self.group is not None and self.group.ran_out_of_memory() else ""


class SandboxRunner(CommandRunner):
    """Runs every attempt of a command line in a sandbox of its own; nothing of it is left afterwards.

    ConfigError where the settings cannot be met here; `check` tries.
    """

    def __init__(self, agent: CommandAgent, term_s: float = 2.0) -> None:
        settings = agent.sandbox
        assert isinstance(settings, Bubblewrap | Container)
        self._settings: Bubblewrap | Container = settings
        self._address = ServerAddress(agent.server_url)
        self._container = container_program() if isinstance(settings, Container) else None
        needed = self._container or "bwrap"
        if shutil.which(needed) is None:
            raise ConfigError(f"sandbox: {settings.type} needs the program {needed!r}, which is not found on PATH")
        in_image = self._container is not None
        super().__init__(agent.command, scored=agent.scored, guardian=agent.guardian, term_s=term_s, found=not in_image)
        self._view = view_of(settings.readable, agent.hidden, program=None if in_image else self._arguments[0])
        self._groups = Cgroups(()) if in_image else Cgroups()
        self._groups.sweep()
        alone = not (self._groups or in_image)
        if alone and os.geteuid() == 0:
            raise ConfigError(
                "sandbox: memory and processes cannot be limited here: no control group with the controllers memory and "
                "pids can be made, and other limits do not bind root; hand the worker a control group (systemd: "
                "Delegate=yes), or run it as another user"
            )
        self._rlimits = rlimits(settings.memory_mb * MEGABYTE, MAX_PROCESSES) if alone else ""

    def __str__(self) -> str:
        if self._container:
            limited = f"limited by {self._container}"
        else:
            limited = "limited by a control group" if self._groups else "limited for each process, by no control group"
        return f"{self._settings.type}, {limited}"

    def check(self) -> None:
        """Run an empty sandbox. ConfigError where it cannot be. Blocks."""
        with tempfile.TemporaryDirectory(prefix="agl-sandbox-") as folder:
            box = self._box(Path(folder), {"PATH": os.environ.get("PATH", os.defpath)}, [])
            group = self._group(box)
            command = _joined(group, self._words(box))
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
                raise ConfigError(f"sandbox: {self._settings.type} cannot be run here: {cause}") from cause
            finally:
                self._end_box(box, group)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").split("\n")
            why = (
                "; ".join(filter(None, map(str.strip, said)))[-MAX_SAID:]
                or f"it ended with exit code {done.returncode}"
            )
            raise ConfigError(f"sandbox: {self._settings.type} cannot be run here: {why}")

    @asynccontextmanager
    async def _program(self, claim: Claim, llm: LLM, folder: Path) -> AsyncIterator[Program]:
        environment = command_environment(self._inherited(), claim, self._inside(llm), Path(INSIDE) / "task.json")
        box = self._box(folder, {**environment, "HOME": HOME}, self._arguments)
        (box.shared / "task.json").write_text(json.dumps(claim.rollout.task), encoding="utf-8")
        async with GatewaySocket(box.shared / "gateway.sock", self._address):
            read, write = os.pipe()
            os.set_blocking(write, False)  # whoever runs inside can open the other end as well
            making = asyncio.get_running_loop().run_in_executor(None, self._group, box)
            try:
                group = await asyncio.shield(making)  # a thread that has begun makes it, though this is cancelled
                yield SandboxedProgram(
                    arguments=_joined(group, self._words(box)),
                    environment={**self._environment(box), **self._guardian.environment},
                    stdin=read,
                    control=write,
                    group=group,
                )
            finally:
                os.close(write)
                os.close(read)
                await asyncio.to_thread(self._end_box, box, await making)

    def _inside(self, llm: LLM) -> LLM:
        """The model as it is reached from inside."""
        outer = llm.anthropic_base_url
        root = f"{self._address.inner_url}{outer[outer.index('/r/') :]}"
        return dataclasses.replace(llm, base_url=f"{root}/v1", anthropic_base_url=root)

    def _inherited(self) -> dict[str, str]:
        """Variables of the worker that an agent gets; an image has a PATH of its own."""
        kept = INHERITED[:-1] if self._container else INHERITED
        return {name: os.environ[name] for name in kept if name in os.environ}

    def _words(self, box: Box) -> list[str]:
        return bubblewrap_command(box) if self._container is None else container_command(box, self._container)

    def _environment(self, box: Box) -> dict[str, str]:
        """Returns that of the program that makes the sandbox; one that makes containers has settings of its own in the
        worker's."""
        if not self._container:
            return dict(box.environment)
        return {**os.environ, **{name: value for name, value in box.environment.items() if name != "HOME"}}

    def _end_box(self, box: Box, group: Cgroup | None) -> None:
        if self._container is not None:
            end_container(self._container, box.name)
        if group is not None:
            group.remove()

    def _group(self, box: Box) -> Cgroup | None:
        if not self._groups:
            return None
        try:
            return self._groups.make(box.name, self._settings.memory_mb * MEGABYTE, MAX_PROCESSES)
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
            memory_mb=self._settings.memory_mb,
            image=self._settings.image if isinstance(self._settings, Container) else "",
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


def _joined(group: Cgroup | None, command: list[str]) -> list[str]:
    return command if group is None else ["/bin/sh", "-c", JOIN, "agl-sandbox", *group.entries, "--", *command]
