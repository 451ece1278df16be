"""Secrets of a process: out of sight of other processes of its user, and its server's key from where they cannot see it.

Every entry point imports this before anything else and calls `hide_memory`, so it imports next to nothing itself. Between
its start and that call a process shows the environment that it was given: a key that must not be seen in those milliseconds
comes by ``--key-file``, ``--key-fd`` or as a systemd credential.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

PR_SET_DUMPABLE = 4
KEY = "AGL_SERVER_KEY"
OWN_SECRETS = (KEY, "AGL_STORE")
"""Variables of ours that no process inherits: the server's key, and a store's URL, which may hold a password."""
MAX_KEY_BYTES = 65_536


def hide_memory() -> None:
    """Keep this process's memory and environment from other processes of the same user, on Linux.

    The kernel then refuses them ptrace, /proc/PID/mem and /proc/PID/environ, and writes no core dump. A program that this
    process executes is not hidden. A user who may trace everything (CAP_SYS_PTRACE, CAP_PERFMON or CAP_SYS_ADMIN: root
    outside a container) is not kept out.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def take_key(file: Path | None = None, descriptor: int | None = None) -> None:
    """Has this process find its server's key in AGL_SERVER_KEY: from a file or an inherited descriptor, else, as a store's
    URL, from the systemd credential of the variable's name. ConfigError where there is no key, or another one, too."""
    from agentlightning.errors import ConfigError

    given = {"--key-file": file, "--key-fd": descriptor}
    sources = [name for name, value in given.items() if value is not None]
    if sources and (len(sources) > 1 or os.environ.get(KEY)):
        raise ConfigError(f"{sources[0]}: expected one source of the key, got {[*sources[1:], KEY][0]}, too")
    if sources:
        os.environ[KEY] = _read(file if descriptor is None else descriptor, sources[0])
    if credentials := os.environ.get("CREDENTIALS_DIRECTORY"):
        for name in OWN_SECRETS:
            if not os.environ.get(name) and (path := Path(credentials, name)).exists():
                os.environ[name] = _read(path, f"the systemd credential {name}")


def add_key_options(parser: argparse.ArgumentParser) -> None:
    """The options that `take_key` takes."""
    parser.add_argument(
        "--key-file", type=Path, help="file with the server's key or a token, in place of AGL_SERVER_KEY"
    )
    parser.add_argument("--key-fd", type=int, help="inherited descriptor to read it from")


def _read(source: Path | int | None, name: str) -> str:
    from agentlightning.errors import ConfigError

    try:
        with open(source if isinstance(source, int) else Path(source or ""), "rb") as opened:
            text = opened.read(MAX_KEY_BYTES).decode("utf-8-sig").strip()
    except (OSError, ValueError) as cause:
        raise ConfigError(f"{name}: cannot be read: {cause}") from cause
    if not text or not text.isprintable():
        raise ConfigError(f"{name}: expected a line with a key, got {'none' if not text else 'other characters'}")
    return text


def shown_above(secrets: Mapping[str, str]) -> str | None:
    """Describes the nearest process above this one that shows one of these variables, with this value, to all processes of
    this user: an init of a container, a shell. None where none does.

    Programs of ours hide what they were given; a user who may trace everything sees it all the same, so by their names.
    """
    wanted = {f"{name}={value}".encode(): name for name, value in secrets.items() if value}
    process = os.getppid()
    while process > 0:
        folder = Path(f"/proc/{process}")
        try:
            stat, owner = (folder / "stat").read_bytes(), folder.stat().st_uid
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # another system, or it ended
            return None
        if owner == os.geteuid() and not _is_ours(words):
            try:
                shown = wanted.keys() & (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                shown = set()
            if shown:
                return f"{wanted[min(shown)]}: process {process} ({os.fsdecode(words[0])})"
        process = int(stat.rpartition(b")")[2].split()[1])
    return None


def _is_ours(words: list[bytes]) -> bool:
    """True for `agl`, run by its interpreter, and ``python [-P …] -m agentlightning…``: not for what is told to run them."""
    if not os.path.basename(words[0]).startswith(b"python"):
        return False
    rest = list(dropwhile(lambda word: word[:1] == b"-" and word not in (b"-m", b"-c"), words[1:]))
    named = rest[1:2] if rest[:1] == [b"-m"] else rest[:1]
    return any(os.path.basename(name).partition(b".")[0] in (b"agl", b"agentlightning") for name in named)
