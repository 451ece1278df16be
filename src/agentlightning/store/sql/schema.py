"""The schema of a database: which version it has, creating it where there is none, upgrading it when asked to.

Driven by the SQL store when it opens, and by ``agl store upgrade``. The version stands in the table ``meta``, where every
version of this program looks for it. A new database is made from tables.py and gets the newest number, an older one is
brought there by the files of ``migrations/versions`` (Alembic), in one transaction: a test compares the two.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Connection, Engine, delete, insert, inspect, select, update
from sqlalchemy.exc import DBAPIError

from agentlightning.errors import MissingExtraError, StoreError
from agentlightning.store.open import Upgraded
from agentlightning.store.sql import tables
from agentlightning.store.sql.database import Database

FORGET_WRITER_S = 24 * 3600
OLDEST_VERSION = 4
"""The first version that leads to the newest; those before it were never released."""


def prepare_schema(connection: Connection, database: Database, now_ns: int) -> bytes:
    """Create the tables where there are none, refuse other versions; returns the signing secret. In one transaction."""
    version = read_version(connection)
    if version is None:
        database.enter_schema(connection)  # several may start at once
        version = read_version(connection)
    if version is None:
        return _create(connection)
    _check_version(version, database.name)
    if version < tables.SCHEMA_VERSION:
        raise StoreError(
            f"{database.name}: its schema has version {version}, this program needs {tables.SCHEMA_VERSION}; "
            "end what uses it, make a copy, and upgrade it with: agl store upgrade"
        )
    proof = (
        tables.meta.c.key == "schema_version"
    )  # a database that cannot be written is refused now, not at the first call
    connection.execute(update(tables.meta).where(proof).values(value=str(version).encode()))
    connection.execute(delete(tables.writers).where(tables.writers.c.seen_ns < now_ns - FORGET_WRITER_S * 10**9))
    secret = select(tables.meta.c.value).where(tables.meta.c.key == "signing_secret")
    return bytes(connection.execute(secret).scalar_one())


def read_version(connection: Connection) -> int | None:
    """The version of the schema; None where the database has none yet."""
    if not inspect(connection).has_table("meta"):
        return None
    known = select(tables.meta.c.value).where(tables.meta.c.key == "schema_version")
    value = connection.execute(known).scalar()
    return None if value is None else int(value)


def upgrade(database: Database) -> Upgraded:
    """Bring the database to this program's version, in one transaction. StoreError where it is newer or has no store."""
    engine = database.writer("upgrade")
    try:
        return _upgrade(engine, database)
    except DBAPIError as error:
        raise database.explain(error) from error
    finally:
        engine.dispose()


def _upgrade(engine: Engine, database: Database) -> Upgraded:
    with engine.connect() as connection, database.upgrading(connection), connection.begin():
        database.enter_schema(connection)
        version = read_version(connection)
        if version is None:
            raise StoreError(f"{database.name}: there is no store in it, and nothing to upgrade")
        _check_version(version, database.name)
        if version < tables.SCHEMA_VERSION:
            _migrate(connection, version)
            database.check_upgraded(connection)
        return Upgraded(database.name, version, tables.SCHEMA_VERSION)


def _migrate(connection: Connection, version: int) -> None:
    """Run the migrations from this version to the newest, in the transaction that is open."""
    try:
        from alembic import command
        from alembic.config import Config
    except ModuleNotFoundError as error:  # imported here: opening a store that is up to date does not need it
        raise MissingExtraError("alembic", "server") from error
    config = Config()
    config.set_main_option("script_location", "agentlightning.store.sql:migrations")
    config.attributes["connection"] = connection
    before = "base" if version == OLDEST_VERSION else f"{version:04}"
    command.stamp(config, before, purge=True)  # the version in `meta` is the one that counts
    command.upgrade(config, "head")
    mine = tables.meta.c.key == "schema_version"
    connection.execute(update(tables.meta).where(mine).values(value=str(tables.SCHEMA_VERSION).encode()))


def _check_version(version: int, name: str) -> None:
    if version > tables.SCHEMA_VERSION:
        raise StoreError(
            f"{name}: its schema has version {version}, this program knows {tables.SCHEMA_VERSION}; "
            "upgrade agentlightning, or choose another path"
        )
    if version < OLDEST_VERSION:
        raise StoreError(
            f"{name}: its schema has version {version}, and only those from {OLDEST_VERSION} on can be upgraded; "
            "choose another path"
        )


def _create(connection: Connection) -> bytes:
    tables.metadata.create_all(connection, checkfirst=False)  # a question for each table took longer than making it
    known = {"schema_version": str(tables.SCHEMA_VERSION).encode(), "signing_secret": secrets.token_bytes(32)}
    connection.execute(insert(tables.meta), [{"key": key, "value": value} for key, value in known.items()])
    return known["signing_secret"]
