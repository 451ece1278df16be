"""The files that a sandbox shows, and the command lines that start and end it: bubblewrap's, and those of a container by
Podman or Docker.

Nothing of this machine is shown that is not named here, and that read-only. `Box` says what is wanted, alike for both kinds.
Nothing secret stands in command lines, because everybody on the machine sees arguments: the environment is handed down.
Knows nothing of attempts.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentlightning.errors import ConfigError

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = (
    "alternatives",
    "ca-certificates",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
)
"""Parts of /etc that programs need and that hold no secret; /etc/ssl/private is none of them."""
INSIDE = "/run/agl"
"""The folder of a sandbox with its task, its relay and the way to the gateway."""
HOME = "/tmp/home"
"""The writable home folder of a sandbox, in its own /tmp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Files of this machine, as a sandbox shows them."""

    shown: tuple[Path, ...]
    """Read-only, at the path that they have here."""
    hidden: tuple[Path, ...]
    """Folders in them that are shown empty, once they are there."""
    links: tuple[tuple[Path, str], ...] = ()
    """Symbolic links of the root folder, /bin for one, and where they lead."""


def view_of(readable: Sequence[str], hidden: Sequence[Path], *, program: str | None) -> View:
    """The view of an agent with these readable files, `hidden` left out of them.

    program: what the command runs, where this machine's files are all there is; the system's and an interpreter are shown
    then. None: an image has them. ConfigError where a file does not exist, or holds what must be hidden, or the program
    would not be found.
    """
    shown = [_existing(name) for name in readable]
    inner = []
    for secret in dict.fromkeys(path.resolve() for path in hidden):
        holders = [path for path in shown if secret.is_relative_to(path.resolve())]
        if any(secret == path.resolve() for path in holders) or (holders and secret.is_file()):
            what = "the server's key" if secret.is_file() else "runs or the store"
            raise ConfigError(
                f"sandbox.readable: {secret} holds {what}, which no agent may read; give the agent a folder of its own"
            )
        inner += [path / secret.relative_to(path.resolve()) for path in holders]
    for path in shown:
        if any(path.resolve().is_relative_to(secret.resolve()) for secret in hidden):
            raise ConfigError(f"sandbox.readable: {path} belongs to runs or the store, which no agent may read")
    if program is None:
        return View(shown=tuple(shown), hidden=tuple(inner))
    system, links = _system()
    shown = [*system, *(Path(prefix) for prefix in (sys.base_prefix, sys.prefix)), *shown]
    _check_program(program, shown)
    return View(shown=tuple(_outermost(shown)), hidden=tuple(inner), links=links)


def etc_files(server_host: str) -> dict[str, str]:
    """Files of /etc that a sandbox has of its own."""
    names = "" if server_host in ("", "localhost") else f" {server_host}"
    return {
        "passwd": f"root:x:0:0::/:/bin/sh\nagent:x:1000:1000::{HOME}:/bin/sh\n",
        "group": "root:x:0:\nagent:x:1000:\n",
        "hosts": f"127.0.0.1 localhost{names}\n",
    }


def _existing(name: str) -> Path:
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if not path.exists():
        raise ConfigError(f"sandbox.readable: {name!r} does not exist (looked from {Path.cwd()})")
    if path == Path("/"):
        raise ConfigError("sandbox.readable: expected the agent's own files and folders, got the whole machine")
    return path


def _system() -> tuple[list[Path], tuple[tuple[Path, str], ...]]:
    folders = [Path("/") / name for name in SYSTEM]
    links = tuple((path, os.readlink(path)) for path in folders if path.is_symlink())
    shown = [path for path in folders if path.is_dir() and not path.is_symlink()]
    return [*shown, *(path for name in ETC if (path := Path("/etc") / name).exists())], links


def _check_program(program: str, shown: Sequence[Path]) -> None:
    found = shutil.which(program)
    for path in _steps(Path(os.path.abspath(found or program))):
        real = path.parent.resolve() / path.name
        if not any(path.is_relative_to(each) or real.is_relative_to(each.resolve()) for each in shown):
            raise ConfigError(
                f"sandbox.readable: program {program!r} is {path}, which is not in the sandbox; add the folder that it "
                "is installed in"
            )


def _steps(path: Path) -> Iterator[Path]:
    """A path, and what it leads to link by link."""
    yield path
    for _ in range(40):
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
        yield path


def _outermost(paths: Sequence[Path]) -> list[Path]:
    """Leaves out those that another one shows already."""
    return [
        path
        for path in dict.fromkeys(paths)
        if not any(path != other and path.is_relative_to(other) and not other.is_symlink() for other in paths)
    ]


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
