"""The server key: what guards ``/api``, and where it is kept when nobody gave one.

Driven by the server process before it serves. The environment's AGL_SERVER_KEY wins. Without it, a server that is reachable
from elsewhere makes a key once and keeps it in a file that only its owner can read; a server on loopback has none. It never
says a key, only where it is.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from agentlightning.errors import ConfigError

VARIABLE = "AGL_SERVER_KEY"


def key_path(store_url: str) -> Path:
    """The file of a store's server key: beside an SQLite file, else in the user's folder for states."""
    if store_url.startswith("sqlite:///"):
        database = store_url.removeprefix("sqlite:///").partition("?")[0]
        return Path(f"{database}.server-key")
    states = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(states) / "agentlightning" / "server-key"


def load_or_create_key(path: Path) -> str:
    """The key in the file, which is made with a new one if it does not exist. Raises ConfigError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return _read(path)
        key = f"sk-agl-server-{secrets.token_urlsafe(32)}"
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(key + "\n")
    except OSError as cause:
        raise ConfigError(f"{path}: the server key cannot be kept there ({cause.strerror}); set {VARIABLE}") from cause
    return key


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        status = os.fstat(descriptor)
        if sys.platform != "win32":
            if status.st_uid != os.geteuid():
                raise ConfigError(f"{path}: the server key belongs to another user; remove the file or set {VARIABLE}")
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{path}: the server key can be read by others; remove the file, so that a new key is made, or, if "
                    f"nobody has read it, run: chmod 600 {path}"
                )
        key = file.read(4096).strip()
    if not key:
        raise ConfigError(f"{path}: expected the server key, found nothing; remove the file, so that a new key is made")
    return key
