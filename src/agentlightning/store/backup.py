"""Backup of the database behind a store, by the database's own tool, while the store is in use.

SQLite writes its file itself (VACUUM INTO), PostgreSQL has pg_dump, Redis ``redis-cli --rdb``. The same tools restore it:
docs/resume.md. Passwords go by the environment, since every user of a machine sees arguments.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from agentlightning.errors import ConfigError, StoreError
from agentlightning.runtime.children import inheritable
from agentlightning.runtime.disk import PRIVATE_FILE
from agentlightning.store.urls import sqlite_file

LOCK_TIMEOUT_S = 60.0
_OURS = ("timeout", "patience", "read_timeout")  # parameters of a PostgreSQL URL that libpq does not know
_CERTIFICATES = {"ssl_ca_certs": "--cacert", "ssl_certfile": "--cert", "ssl_keyfile": "--key"}
"""Parameters of a Redis URL, and the options of redis-cli for them."""


def backup_store(url: str, to: Path) -> None:
    """Write the store of one moment to a new file.

    ConfigError for a store without a database of its own, StoreError where the file exists or a tool is missing or fails.
    """
    scheme, parts = url.partition("://")[0], urlsplit(url)
    if scheme not in ("sqlite", "postgresql", "postgres", "redis", "rediss"):
        raise ConfigError(
            f"store: expected sqlite:///PATH, postgresql://… or redis://…, got a store at {scheme}://; a server's store is "
            "backed up where it is: name its database"
        )
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.touch(PRIVATE_FILE, exist_ok=False)
    except OSError as cause:
        raise StoreError(f"{to}: cannot be written: {cause.strerror}; name a new file") from cause
    if (file := sqlite_file(url)) is not None:
        try:
            with contextlib.closing(sqlite3.connect(file, LOCK_TIMEOUT_S)) as connection:
                connection.execute("VACUUM INTO ?", [str(to)])
        except sqlite3.Error as cause:
            raise StoreError(f"{file}: cannot be copied: {cause}") from cause
        return
    password, said = unquote(parts.password or ""), dict(parse_qsl(parts.query))
    user = f"{parts.username}@" if parts.username else ""
    place = f"{user}{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    if scheme.startswith("postgres"):
        query = urlencode({name: value for name, value in said.items() if name not in _OURS})
        database = urlunsplit(("postgresql", place, parts.path, query, ""))
        _run(["pg_dump", "--format=custom", "--no-owner", f"--file={to}", database], {"PGPASSWORD": password})
        return
    tls = [part for name, option in _CERTIFICATES.items() if name in said for part in (option, said[name])]
    command = ["redis-cli", "--no-auth-warning", "-h", parts.hostname or "localhost", "-p", str(parts.port or 6379)]
    command += ["--user", unquote(parts.username)] if parts.username else []
    command += ["--tls", *tls] if scheme == "rediss" else []
    _run([*command, "--rdb", str(to)], {"REDISCLI_AUTH": password})


def _run(command: list[str], secrets: dict[str, str]) -> None:
    if shutil.which(command[0]) is None:
        raise StoreError(
            f"{command[0]} is not installed here; install it (Debian: postgresql-client, redis-tools), or run it where it "
            f"is: {' '.join(command)}"
        )
    given = {name: value for name, value in secrets.items() if value}
    done = subprocess.run(
        command, env={**inheritable(os.environ), **given}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise StoreError(f"{command[0]} failed: {' '.join((done.stderr or done.stdout).split())[-1000:]}")
