"""Kinds of sandboxes, and the command lines that start and end them: bubblewrap, gVisor, Docker and Podman.

`Box` says what is wanted, alike for all of them; a kind turns it into the words of its program. Nothing secret stands in
them, because everybody on the machine sees arguments: the environment is handed down. Knows nothing of attempts.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentlightning.config.sandbox import SandboxConfig, SandboxKind
from agentlightning.runner.sandbox.filesystem import HOME, INSIDE, View

END_TIMEOUT_S = 30.0
USER = 1000
"""Number of the user inside, and of its group."""
MEGABYTE = 1024 * 1024
MAX_ULIMIT = 16_384
"""Files and processes of a container's user, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One sandbox."""

    name: str
    folder: Path
    """Of the worker alone; what stands in `shared` is shown at INSIDE."""
    view: View
    settings: SandboxConfig
    cwd: str
    relay: Sequence[str]
    """Arguments of the relay: the program is among them."""
    environment: Mapping[str, str]

    @property
    def hidden(self) -> list[Path]:
        """The folders to show empty: a worker may start before the first run of its folder."""
        return [path for path in self.view.hidden if path.is_dir()]

    @property
    def shared(self) -> Path:
        """The folder that is shown at INSIDE."""
        return self.folder / "shared"

    @property
    def etc(self) -> Path:
        """Files that take their place in /etc."""
        return self.folder / "etc"


class Kind(Protocol):
    """A program that makes sandboxes."""

    program: str
    own_root: bool
    """True where this machine's files are shown; False where an image has them."""
    needs_group: bool
    """True where only a control group bounds its memory and processes."""
    limits_itself: bool
    """True where it takes the limits as arguments."""

    def command(self, box: Box) -> list[str]:
        """The words that start it."""
        ...

    def end(self, box: Box) -> None:
        """End what is not the program's child and may be left. Blocks."""
        ...


def relay_python() -> str:
    """The interpreter that the relay runs on where this machine's files are shown: that of the worker, outside any venv."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


class Bubblewrap:
    """Namespaces of Linux."""

    program = "bwrap"
    own_root = True
    needs_group = False
    limits_itself = False

    def command(self, box: Box) -> list[str]:
        """The words that start it."""
        words = [self.program, "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
        words += [f"--unshare-{space}" for space in ("user", "pid", "net", "ipc", "uts", "cgroup-try")]
        words += ["--disable-userns", "--uid", str(USER), "--gid", str(USER), "--hostname", "agent"]
        private = Path("/tmp")
        for path in (path for path in box.view.shown if not path.is_relative_to(private)):
            words += ["--ro-bind", str(path.resolve()), str(path)]
        for path, target in box.view.links:
            words += ["--symlink", target, str(path)]
        for file in box.etc.iterdir():
            words += ["--ro-bind", str(file), f"/etc/{file.name}"]
        # Read-only, because a worker that is root would own /proc/sys even in here; /dev is memory without a bound else.
        words += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        for place in ("/tmp", "/dev/shm"):
            words += ["--perms", "1777", "--size", str(box.settings.disk_mb * MEGABYTE), "--tmpfs", place]
        for path in (path for path in box.view.shown if path.is_relative_to(private)):
            words += ["--ro-bind", str(path.resolve()), str(path)]
        for path in box.hidden:
            words += ["--tmpfs", str(path), "--remount-ro", str(path)]
        words += ["--ro-bind", str(box.shared), INSIDE, "--dir", box.cwd, "--chdir", box.cwd, "--remount-ro", "/"]
        return [*words, "--", relay_python(), "-I", "-S", *box.relay]

    def end(self, box: Box) -> None:
        """Nothing is left: its processes end with its first one."""


class Gvisor:
    """A kernel of its own."""

    program = "runsc"
    own_root = True
    needs_group = True
    limits_itself = False

    def command(self, box: Box) -> list[str]:
        """The words that start it, from a bundle in the sandbox's folder."""
        root = box.folder / "root"
        for path in (*box.view.shown, Path(INSIDE), Path("/proc"), Path("/tmp"), Path(box.cwd)):
            place = root / str(path).lstrip("/")
            if path.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
            else:
                place.mkdir(parents=True, exist_ok=True)
        for path, target in box.view.links:
            (root / path.name).symlink_to(target)
        for file in box.etc.iterdir():
            (root / "etc").mkdir(exist_ok=True)
            (root / "etc" / file.name).write_bytes(file.read_bytes())
        specification = json.dumps(self._specification(box, root))
        (box.folder / "config.json").write_text(specification, encoding="utf-8")
        return [*self._runsc(box), "run", "--bundle", str(box.folder), box.name]

    def end(self, box: Box) -> None:
        """Kill it and remove its state."""
        _quietly([*self._runsc(box), "delete", "--force", box.name])

    def _runsc(self, box: Box) -> list[str]:
        state = str(box.folder / "state")
        # The worker's control group bounds it: runsc itself is in it.
        return [self.program, "--root", state, "--network=none", "--host-uds=open", "--ignore-cgroups"]

    def _specification(self, box: Box, root: Path) -> dict[str, object]:
        mounts: list[dict[str, object]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
        mounts.append(_tmpfs("/tmp", "mode=1777", f"size={box.settings.disk_mb * MEGABYTE}"))
        mounts += [_bind(path.resolve(), str(path)) for path in box.view.shown]
        mounts += [_tmpfs(str(path), "ro") for path in box.hidden]
        mounts.append(_bind(box.shared, INSIDE))
        no_capabilities: dict[str, list[str]] = {
            kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")
        }
        return {
            "ociVersion": "1.0.0",
            "root": {"path": str(root), "readonly": True},
            "hostname": "agent",
            "mounts": mounts,
            "process": {
                # The worker's own, whose files the agent is to read; it means nothing outside this kernel.
                "user": {"uid": os.getuid(), "gid": os.getgid()},
                "args": [relay_python(), "-I", "-S", *box.relay],
                "env": [f"{name}={value}" for name, value in box.environment.items()],
                "cwd": box.cwd,
                "capabilities": no_capabilities,
                "noNewPrivileges": True,
            },
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        }


class Container:
    """A container of an image, by Docker or what understands its command line."""

    own_root = False
    needs_group = False
    limits_itself = True

    def __init__(self, program: str) -> None:
        self.program = program

    def command(self, box: Box) -> list[str]:
        """The words that start it."""
        settings = box.settings
        words = [self.program, "run", "--rm", "--interactive", "--name", box.name, "--log-driver", "none"]
        words += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        words += ["--memory", f"{settings.memory_mb}m", "--memory-swap", f"{settings.memory_mb}m"]
        words += ["--user", f"{os.getuid()}:{os.getgid()}"]  # the worker's own, whose files the agent is to read
        if self.program == "podman":
            words.append("--read-only-tmpfs=false")  # else /run and /var/tmp can be written, beyond disk_mb
            if os.getuid() != 0:
                words += ["--userns", "keep-id"]
        words += ["--pids-limit", str(settings.processes), "--hostname", "agent", "--workdir", box.cwd]
        words += ["--tmpfs", f"/tmp:rw,mode=1777,size={settings.disk_mb}m"]
        for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
            # What Podman sets by itself may be more than this machine permits; processes are bounded by --pids-limit.
            hard = resource.getrlimit(kind)[1]
            limit = MAX_ULIMIT if hard == resource.RLIM_INFINITY else min(hard, MAX_ULIMIT)
            words += ["--ulimit", f"{name}={limit}:{limit}"]
        shown = {str(path): path.resolve() for path in box.view.shown}
        shown |= {f"/etc/{file.name}": file for file in box.etc.iterdir() if file.name == "hosts"}
        for place, path in {**shown, INSIDE: box.shared}.items():
            words += ["--mount", f"type=bind,source={path},destination={place},readonly"]
        empty = [str(path) for path in box.hidden]
        if not any(Path(box.cwd).is_relative_to(path) for path in box.view.shown):
            empty.append(box.cwd)  # Podman makes no working folder
        for place in empty:
            words += ["--tmpfs", f"{place}:ro"]
        for name in box.environment:  # values are handed down, but for that which the program itself reads
            words += ["--env", f"HOME={HOME}" if name == "HOME" else name]
        words += ["--entrypoint", "python3", str(settings.image), "-I", "-S"]
        return [*words, *box.relay]

    def end(self, box: Box) -> None:
        """Kill and remove the container."""
        _quietly([self.program, "kill", box.name])
        _quietly([self.program, "rm", "--force", box.name])


def kind_of(name: SandboxKind) -> Kind:
    """The kind with this name."""
    match name:
        case "bubblewrap":
            return Bubblewrap()
        case "gvisor":
            return Gvisor()
        case _:
            return Container(name)


def _bind(source: Path, destination: str) -> dict[str, object]:
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["ro", "rbind"]}


def _tmpfs(destination: str, *options: str) -> dict[str, object]:
    return {"destination": destination, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", *options]}


def _quietly(words: Sequence[str]) -> None:
    """Run a command whose failure says only that there was nothing to end."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(words, capture_output=True, timeout=END_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
