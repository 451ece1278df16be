"""A real PostgreSQL server on a free port of this machine, for tests and benchmarks: started, killed and started again.

Its data live in a folder of its own under the system's temporary folder; as root it runs as an unprivileged user, since it
refuses root. Its text is sorted by a language's rules (ICU en-US) where it can be, so that a query that relies on the order
of bytes without saying so is found out.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg
from psycopg import sql
from reserved_place import reserved_place

USER = "agl"
PASSWORD = "secret"
START_S = 60.0
LOCALE = ("--encoding=UTF8", "--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US")
WATCH = """read -r _
pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null) && ps -o args= -p "$pid" | grep -q "$1" && kill -QUIT "$pid" && sleep 1
rm -rf "$1"
"""
"""Ends the server and deletes its data when whoever started it has ended, however that was."""
SETTINGS = ("max_connections=200", "shared_buffers=64MB", "max_wal_size=512MB", "log_min_messages=fatal")


class PostgresServer:
    """One server. It runs from the constructor on, until `stop`; `kill` and `start` may be repeated in between.

    `durable` says whether a commit waits for the disk (fsync), which survives a power cut. SIGKILL is survived either way:
    what was written is with the kernel. Commits are synchronous in both. `settings` are further ``name=value`` for it.
    """

    def __init__(self, durable: bool = False, settings: tuple[str, ...] = ()) -> None:
        self._binaries = binaries()
        if self._binaries is None:
            raise FileNotFoundError(missing())
        self._settings = (*SETTINGS, *settings)
        if not durable:
            self._settings += ("fsync=off", "full_page_writes=off")
        self._folder = Path(tempfile.mkdtemp(prefix="agl-postgres-"))
        self._account = _account()
        if self._account:
            shutil.chown(self._folder, self._account["user"], self._account["group"])
        self._place = reserved_place()
        self.port = int(self._place.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = subprocess.Popen(
            ["sh", "-c", WATCH, "watch", self._folder], stdin=subprocess.PIPE, start_new_session=True
        )
        self._initialise()
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """What the server has said."""
        return (self._folder / "log").read_text(errors="replace")

    @property
    def data(self) -> Path:
        """The folder with its data."""
        return self._folder / "data"

    @property
    def pid(self) -> int:
        """Of the postmaster."""
        assert self._process is not None
        return self._process.pid

    def url(self, name: str | None = None, template: str = "template1") -> str:
        """The URL of a new database, empty or a copy of another; one of this name is dropped first. It stays the same across
        restarts."""
        name = name or f"db_{secrets.token_hex(6)}"
        with self.connect() as connection:
            quoted = sql.Identifier(name)
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(quoted))
            connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(quoted, sql.Identifier(template)))
        return self.url_of(name)

    def url_of(self, name: str, user: str = USER, password: str = PASSWORD) -> str:
        """The URL of a database that is there, or not."""
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{name}"

    def drop(self, url: str) -> None:
        """Drop the database at a URL that `url` gave, whoever is connected to it."""
        name = sql.Identifier(url.rpartition("/")[2])
        with self.connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))

    def connect(self, name: str = "postgres") -> psycopg.Connection[Any]:
        """A connection of the superuser, for use in `with`; every statement commits by itself."""
        return psycopg.connect(self.url_of(name), autocommit=True, connect_timeout=10)

    def start(self) -> None:
        """Start it where it does not run; returns when it takes connections (after recovery, where it was killed)."""
        if self._process is not None:
            return
        assert self._binaries is not None
        settings = [part for setting in self._settings for part in ("-c", setting)]
        place = ["-D", str(self.data), "-p", str(self.port), "-c", "listen_addresses=127.0.0.1", "-k", ""]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", *place, *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                **self._account,
            )
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(psycopg.OperationalError), self.connect():
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {self.log[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL for every process of the server at once, as when its machine dies."""
        if self._process is None:
            return
        postmaster = psutil.Process(self._process.pid)
        postmaster.suspend()  # else it would start those again that die before it
        processes = [*postmaster.children(recursive=True), postmaster]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        while any(map(_runs, processes)):  # a new one is not started while they use its memory
            time.sleep(0.002)
        self._process = None

    def stop(self) -> None:
        """End it and delete its data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # "fast": connections are ended
            try:
                self._process.wait(START_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)
        self._place.close()
        self._watch.communicate()

    def _initialise(self) -> None:
        assert self._binaries is not None
        password = self._folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        given = ["-D", str(self.data), "-U", USER, "--auth=scram-sha-256", f"--pwfile={password}", "--no-sync"]
        for locale in (LOCALE, ("--encoding=UTF8", "--locale=C")):  # before version 15 there is no provider to choose
            command = [self._binaries / "initdb", *given, *locale]
            made = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, **self._account)
            if made.returncode == 0:
                return
        raise RuntimeError(f"initdb failed: {made.stderr}")


def binaries() -> Path | None:
    """The folder with `postgres` and `initdb`: on the path, else where Debian or Homebrew put the newest version."""
    found = shutil.which("postgres")
    if found is not None:
        return Path(found).resolve().parent
    for pattern in ("usr/lib/postgresql/*/bin/postgres", "opt/homebrew/opt/postgresql*/bin/postgres"):
        installed = sorted(Path("/").glob(pattern), key=lambda path: [int(n) for n in path.parts if n.isdigit()])
        if installed:
            return installed[-1].parent
    return None


def missing() -> str | None:
    """Why no server can be started here; None where one can."""
    return None if binaries() is not None else "PostgreSQL is not installed (make servers installs it)"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _account() -> dict[str, Any]:
    """Root may not run the server: whom to run it as, in the words of subprocess."""
    if os.geteuid() != 0:
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = known.get("postgres") or known["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
