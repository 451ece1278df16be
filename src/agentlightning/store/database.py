"""The connection to an SQL database: engines, pragmas, schema, and what its failures mean in plain words.

Driven by the SQL store and its writer. The writer's engine takes the write lock when a transaction begins, so that a
transaction never fails half way because another process wrote in between; readers see one snapshot and cannot write.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, insert, select, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool, StaticPool

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.store import tables

BUSY_S = 10
"""Seconds to wait for another process's lock; ``?timeout=`` in the URL says otherwise."""

READERS = 2


@dataclass(frozen=True, slots=True)
class Database:
    """Where the data are: parsed from a store's URL."""

    url: URL
    name: str
    """How sentences call it: the path."""
    in_memory: bool

    @staticmethod
    def at(url: str) -> Database:
        """`memory://` or `sqlite:///path`; ConfigError otherwise."""
        if url == "memory://":
            return Database(make_url("sqlite://"), "the store in memory", True)
        try:
            parsed = make_url(url)
        except ArgumentError:
            raise ConfigError(f"store: expected memory:// or sqlite:///path, got {url!r}") from None
        if parsed.drivername != "sqlite" or parsed.database in (None, "", ":memory:"):
            raise ConfigError(f"store: expected memory:// or sqlite:///path, got {url!r}")
        if "timeout" not in parsed.query:
            parsed = parsed.update_query_dict({"timeout": str(BUSY_S)})
        return Database(parsed, str(parsed.database), False)

    def writer(self) -> Engine:
        """The engine of the one writing thread."""
        engine = create_engine(self.url, poolclass=StaticPool if self.in_memory else NullPool)
        pragmas = ["foreign_keys = ON"]
        if not self.in_memory:
            pragmas += ["journal_mode = WAL", "synchronous = NORMAL"]
        return _prepared(engine, pragmas, "BEGIN IMMEDIATE")

    def reader(self) -> Engine:
        """The engine of reading threads; only of a file."""
        return _prepared(create_engine(self.url, pool_size=READERS), ["query_only = ON"], "BEGIN")

    def explain(self, error: DBAPIError) -> StoreError:
        """The sentence for a failure of the database, with the path and what to do."""
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
    "disk is full": "the disk is full; free some space and go on: what was acknowledged is kept",
    "readonly": "the file or its folder is read-only; make both writable, or choose another path",
    "locked": "another process holds the database; end it, or choose another path",
    "not a database": "is not an SQLite database; choose another path, or move that file away",
    "malformed": "the database is damaged; restore a copy, or recover it with: sqlite3 FILE .recover",
    "disk i/o error": "the disk refused a read or write; check its space, quota and health: what was acknowledged is kept",
}


def prepare_schema(connection: Connection, name: str) -> bytes:
    """Create the tables where there are none, upgrade older ones, return the signing secret. In one transaction."""
    tables.meta.create(connection, checkfirst=True)
    known: dict[str, bytes] = {row.key: row.value for row in connection.execute(select(tables.meta))}
    if "schema_version" not in known:
        tables.metadata.create_all(connection)
        known = {"schema_version": str(tables.SCHEMA_VERSION).encode(), "signing_secret": secrets.token_bytes(32)}
        connection.execute(insert(tables.meta), [{"key": key, "value": value} for key, value in known.items()])
    version = int(known["schema_version"])
    if version > tables.SCHEMA_VERSION:
        raise StoreError(
            f"{name}: its schema has version {version}, this program knows {tables.SCHEMA_VERSION}; "
            "upgrade agentlightning, or choose another path"
        )
    for older in range(version, tables.SCHEMA_VERSION):
        for statement in tables.UPGRADES[older]:
            connection.exec_driver_sql(statement)
    proof = tables.meta.c.key == "schema_version"  # a file that cannot be written is refused now, not at the first call
    connection.execute(update(tables.meta).where(proof).values(value=str(tables.SCHEMA_VERSION).encode()))
    return known["signing_secret"]


def _prepared(engine: Engine, pragmas: list[str], begin: str) -> Engine:
    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself: BEGIN is ours
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
