"""The schema of a database: creates it where there is none, and refuses another version.

Driven by the SQL store when it opens. The version stands in the table ``meta``. A new database is made from tables.py
without Alembic, whose one revision makes the same; the first release adds the next.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Connection, insert, inspect, select, update

from agentlightning.errors import StoreError
from agentlightning.store.sql import tables
from agentlightning.store.sql.database import Database


def prepare_schema(connection: Connection, database: Database) -> bytes:
    """Create the tables where there are none, refuse another version; returns the signing secret. In one transaction."""
    version = _read_version(connection)
    if version is None:
        database.enter_schema(connection)  # several may start at once
        version = _read_version(connection)
    if version is None:
        return _create(connection)
    if version != tables.SCHEMA_VERSION:
        raise StoreError(
            f"{database.name}: its schema has version {version}, this program needs {tables.SCHEMA_VERSION}; choose another "
            "place for the store, or use the version of agentlightning that made it"
        )
    # A database that cannot be written is refused now, not at the first call.
    proof = tables.meta.c.key == "schema_version"
    connection.execute(update(tables.meta).where(proof).values(value=str(version).encode()))
    secret = select(tables.meta.c.value).where(tables.meta.c.key == "signing_secret")
    return bytes(connection.execute(secret).scalar_one())


def _read_version(connection: Connection) -> int | None:
    if not inspect(connection).has_table("meta"):
        return None
    known = select(tables.meta.c.value).where(tables.meta.c.key == "schema_version")
    value = connection.execute(known).scalar()
    return None if value is None else int(value)


def _create(connection: Connection) -> bytes:
    tables.metadata.create_all(connection, checkfirst=False)  # a question for each table took longer than making it
    known = {"schema_version": str(tables.SCHEMA_VERSION).encode(), "signing_secret": secrets.token_bytes(32)}
    connection.execute(insert(tables.meta), [{"key": key, "value": value} for key, value in known.items()])
    return known["signing_secret"]
