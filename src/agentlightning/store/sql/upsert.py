"""INSERT … ON CONFLICT: the one statement that every dialect has and the common layer of SQLAlchemy has not.

Driven by the SQL methods. Statements are made where they are used: SQLAlchemy caches what they compile to, for each dialect.
"""

from __future__ import annotations

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite

Upsert = sqlite.Insert | postgresql.Insert


def upsert(connection: Connection, table: Table) -> Upsert:
    """An INSERT into the table for this connection's dialect, still without its conflict clause."""
    return upsert_into(connection.dialect.name, table)


def upsert_into(dialect: str, table: Table) -> Upsert:
    """The same, for the dialect of this name."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
