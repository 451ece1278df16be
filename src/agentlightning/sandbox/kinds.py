"""Command lines that start and end a sandbox: bubblewrap's, and those of a container by Podman or Docker.

`Box` says what is wanted, alike for both. Nothing secret stands in them, because everybody on the machine sees
arguments: the environment is handed down. Knows nothing of attempts.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentlightning.sandbox.filesystem import HOME, INSIDE, View

END_TIMEOUT_S = 30.0
USER = 1000
"""Number of the user inside, and of its group."""
MEGABYTE = 1024 * 1024
MAX_ULIMIT = 16_384
"""Files and processes of a container's user, at most."""
MAX_PROCESSES = 256
"""Processes and threads of an attempt, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One sandbox."""

    name: str
    folder: Path
    """Of the worker alone; what stands in `shared` is shown at INSIDE."""
    view: View
    memory_mb: int
    image: str = ""
    cwd: str
    relay: Sequence[str]
    """Arguments of the relay: the program is among them."""
    environment: Mapping[str, str]

    @property
    def disk_mb(self) -> int:
        """Size of its own /tmp, which is in memory."""
        return max(1, self.memory_mb // 2)

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


def bubblewrap_command(box: Box) -> list[str]:
    """The words that start a sandbox of Linux namespaces, whose processes end with its first one."""
    words = ["bwrap", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
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
        words += ["--perms", "1777", "--size", str(box.disk_mb * MEGABYTE), "--tmpfs", place]
    for path in (path for path in box.view.shown if path.is_relative_to(private)):
        words += ["--ro-bind", str(path.resolve()), str(path)]
    for path in box.hidden:
        words += ["--tmpfs", str(path), "--remount-ro", str(path)]
    words += ["--ro-bind", str(box.shared), INSIDE, "--dir", box.cwd, "--chdir", box.cwd, "--remount-ro", "/"]
    # The worker's interpreter, outside any virtual environment.
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [*words, "--", str(python), "-I", "-S", *box.relay]


def container_program() -> str:
    """Podman where it is installed, else Docker."""
    return "podman" if shutil.which("podman") else "docker"


def container_command(box: Box, program: str) -> list[str]:
    """The words that start a container of the box's image."""
    words = [program, "run", "--rm", "--interactive", "--name", box.name, "--log-driver", "none"]
    words += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    words += ["--memory", f"{box.memory_mb}m", "--memory-swap", f"{box.memory_mb}m"]
    words += ["--user", f"{os.getuid()}:{os.getgid()}"]  # the worker's own, whose files the agent is to read
    if program == "podman":
        words.append("--read-only-tmpfs=false")  # else /run and /var/tmp can be written, beyond disk_mb
        if os.getuid() != 0:
            words += ["--userns", "keep-id"]
    words += ["--pids-limit", str(MAX_PROCESSES), "--hostname", "agent", "--workdir", box.cwd]
    words += ["--tmpfs", f"/tmp:rw,mode=1777,size={box.disk_mb}m"]
    for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        # What Podman sets by itself may be more than this machine permits; processes are bounded by --pids-limit.
        hard = resource.getrlimit(kind)[1]
        limit = MAX_ULIMIT if hard == resource.RLIM_INFINITY else min(hard, MAX_ULIMIT)
        words += ["--ulimit", f"{name}={limit}:{limit}"]
    shown = {str(path): path.resolve() for path in box.view.shown}
    shown |= {"/etc/hosts": box.etc / "hosts", INSIDE: box.shared}
    for place, path in shown.items():
        words += ["--mount", f"type=bind,source={path},destination={place},readonly"]
    empty = [str(path) for path in box.hidden]
    if not any(Path(box.cwd).is_relative_to(path) for path in box.view.shown):
        empty.append(box.cwd)  # Podman makes no working folder
    for each in empty:
        words += ["--tmpfs", f"{each}:ro"]
    for name in box.environment:  # values are handed down, but for that which the program itself reads
        words += ["--env", f"HOME={HOME}" if name == "HOME" else name]
    return [*words, "--entrypoint", "python3", box.image, "-I", "-S", *box.relay]


def end_container(program: str, name: str) -> None:
    """Kill and remove a container that may be left. Blocks."""
    for words in ((program, "kill", name), (program, "rm", "--force", name)):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(words, capture_output=True, timeout=END_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
