"""Files of this machine that a sandbox shows, read-only: the system's, the agent's and an interpreter.

Nothing is shown that is not named here. Knows nothing of how a sandbox mounts it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
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
        if any(secret == path.resolve() for path in holders):
            raise ConfigError(
                f"sandbox.readable: {secret} holds runs or the store, which no agent may read; give the agent a folder "
                "of its own"
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
