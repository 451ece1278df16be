"""SQLite, in memory or in a file: engines, pragmas, and the sentences for its failures.

The writer takes the write lock when a transaction begins, so that none fails half way because another process wrote in
between; readers see one snapshot and cannot write.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool, StaticPool

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.runtime.disk import PRIVATE_FILE, close_to_others, sync
from agentlightning.store.sql.database import MAX_READ_S, TOO_LONG, Database, begin_by
from agentlightning.store.urls import seconds_in_url

BUSY_TIMEOUT_S = 10  # seconds to wait for another process's lock; ``?timeout=`` in the URL says otherwise
CACHE_KB = 32_000
STEPS_A_LOOK = 10_000  # instructions of SQLite's machine between two looks at the clock: about a millisecond of a read
CHECKPOINT_PAGES = 8_000
"""32 MB of the log: copied into the file, and synchronised, an eighth as often as by default, which was a tenth of the
writer's time."""


class SqliteDatabase(Database):
    """A file, or memory where the URL names none."""

    def __init__(self, url: URL) -> None:
        self._in_memory = url.database is None
        self.name = "the store in memory" if self._in_memory else str(url.database)
        self.readers = 0 if self._in_memory else Database.readers
        self._read_s = seconds_in_url("read_timeout", url.query.get("read_timeout", MAX_READ_S))
        self._synchronous = str(url.query.get("synchronous", "normal")).lower()
        if self._synchronous not in ("normal", "full"):
            raise ConfigError(f"store: synchronous: expected normal or full in its URL, got {self._synchronous!r}")
        url = url.difference_update_query(["read_timeout", "synchronous"])
        if not self._in_memory and "timeout" not in url.query:
            url = url.update_query_dict({"timeout": str(BUSY_TIMEOUT_S)})
        self._file = Path(self.name.removeprefix("file:")).absolute()
        self._url = url

    def writer(self, name: str) -> Engine:
        if not self._in_memory:
            _make_private(self._file)
        engine = create_engine(self._url, poolclass=StaticPool if self._in_memory else NullPool)
        pragmas = ["foreign_keys = ON"]
        if not self._in_memory:
            pragmas += ["journal_mode = WAL", f"synchronous = {self._synchronous}", f"cache_size = -{CACHE_KB}"]
            pragmas += [f"wal_autocheckpoint = {CHECKPOINT_PAGES}"]
        return _configured(engine, pragmas, "BEGIN IMMEDIATE")

    def reader(self) -> Engine:
        engine = create_engine(self._url, pool_size=self.readers)

        @event.listens_for(engine, "begin")
        def bound(connection: Connection) -> None:
            deadline = time.monotonic() + self._read_s
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_A_LOOK)

        return _configured(engine, ["query_only = ON"], "BEGIN")

    def sync(self) -> None:
        if self._in_memory or self._synchronous == "full":
            return
        # The log by a descriptor of our own: SQLite's locks are those of the other files, and would end with its closing.
        for path in (Path(f"{self._file}-wal"), self._file.parent):
            with contextlib.suppress(FileNotFoundError):
                sync(path)

    def explain(self, error: DBAPIError) -> StoreError:
        reason = str(error.orig)
        if isinstance(error, IntegrityError):
            return ConflictError(f"{self.name}: the change contradicts what is recorded: {reason}")
        said = reason.lower()
        if "unable to open" in said:
            return StoreError(f"{self.name}: {self._why_not_opened()}")
        for symptom, sentence in _SENTENCES.items():
            if symptom in said:
                return StoreError(f"{self.name}: {sentence}")
        return StoreError(f"{self.name}: the database failed: {reason}")

    def _why_not_opened(self) -> str:
        folder = os.path.dirname(os.path.abspath(self.name.removeprefix("file:")))
        if os.path.isdir(self.name):
            return "is a folder; name a file in it"
        if not os.path.isdir(folder):
            return f"the folder {folder} does not exist; create it"
        return f"cannot be opened; check the permissions of the file and of {folder}"


_SENTENCES = {
    "interrupted": TOO_LONG,
    "disk is full": "the disk is full; free some space and go on: what was acknowledged is kept",
    "readonly": "the file or its folder is read-only; make both writable, or choose another path",
    "locked": "another process holds the database; end it, or choose another path",
    "not a database": "is not an SQLite database; choose another path, or move that file away",
    "malformed": "the database is damaged; restore a copy, or recover it with: sqlite3 FILE .recover",
    "disk i/o error": "the disk refused a read or write; check its space, quota and health: what was acknowledged is kept",
}


def _make_private(file: Path) -> None:
    """Make the file for this user alone, or take it from all others: it holds secrets and leases. SQLite gives its log and
    shared memory the file's mode, and explains what cannot be made here."""
    with contextlib.suppress(OSError):
        try:
            # Never a descriptor of a file that may be open: closing it would end SQLite's locks.
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, PRIVATE_FILE))
        except FileExistsError:
            for path in (file, *(file.with_name(file.name + end) for end in ("-wal", "-shm"))):
                with contextlib.suppress(FileNotFoundError):
                    close_to_others(path)


def _configured(engine: Engine, pragmas: list[str], begin: str) -> Engine:
    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself: BEGIN is ours
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    return begin_by(engine, begin)
