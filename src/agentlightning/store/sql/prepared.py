"""Prepared statements: SQLAlchemy's constructs, compiled once and executed on the driver's own cursor.

Driven by the writer's methods, thousands of times a second: what SQLAlchemy does around each execution costs several times
what SQLite needs for the statement itself. Lists are one parameter, `ids`, whatever their length. Errors of the driver are
raised as SQLAlchemy's, so that nobody else has to know. Decides nothing.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
from sqlalchemy import Connection, Dialect, Executable
from sqlalchemy.dialects import registry
from sqlalchemy.exc import DBAPIError

Row = Any
"""A named tuple of the statement's columns."""

_IDS = " IN (__[POSTCOMPILE_ids])"
_DRIVERS = {"sqlite": "sqlite.pysqlite", "postgresql": "postgresql.psycopg"}
_AMONG = {"sqlite": " IN (SELECT value FROM json_each(?))", "postgresql": " = ANY(%(ids)s)"}
"""Notation of SQLAlchemy for a list of parameters, and for one that is a list itself."""


def execute(connection: Connection, statement: Executable, given: Mapping[str, Any]) -> list[Row]:
    """Runs the statement with these parameters; its rows, where it has any."""
    prepared = _prepare(statement, connection.dialect.name, ())
    with _cursor(connection, prepared.text) as cursor:
        cursor.execute(prepared.text, prepared.arguments(given))
        return prepared.rows(cursor) if cursor.description is not None else []


def execute_many(connection: Connection, statement: Executable, given: Sequence[Mapping[str, Any]]) -> None:
    """Runs an INSERT or UPDATE of the columns that the first of these parameters names, once for each."""
    if not given:
        return
    prepared = _prepare(statement, connection.dialect.name, tuple(given[0]))
    with _cursor(connection, prepared.text) as cursor:
        cursor.executemany(prepared.text, [prepared.arguments(each) for each in given])


def execute_rows(connection: Connection, text: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Runs a statement in the driver's own words, once for each row of positional parameters."""
    with _cursor(connection, text) as cursor:
        cursor.executemany(text, rows)


class _Prepared:
    def __init__(self, statement: Any, dialect: Dialect, columns: tuple[str, ...]) -> None:
        compiled = statement.compile(dialect=dialect, column_keys=list(columns) or None)
        self.text = str(compiled).replace(_IDS, _AMONG[dialect.name])
        self._defaults: dict[str, Any] = dict(compiled.params)
        self._order: tuple[str, ...] | None = tuple(compiled.positiontup) if compiled.positional else None
        self._make: Callable[[Iterable[Any]], Row] | None = None

    def arguments(self, given: Mapping[str, Any]) -> Any:
        """By position for SQLite, which takes a list as JSON; by name for PostgreSQL, which knows lists."""
        if self._order is None:
            return {**self._defaults, **given}
        known = self._defaults
        return tuple(_plain(given[name] if name in given else known[name]) for name in self._order)

    def rows(self, cursor: Any) -> list[Row]:
        if self._make is None:
            columns = [column[0] for column in cursor.description]
            self._make = getattr(namedtuple("Row", columns), "_make")  # noqa
        return list(map(self._make, cursor.fetchall()))


@functools.cache
def _prepare(statement: Executable, dialect: str, columns: tuple[str, ...]) -> _Prepared:
    return _Prepared(statement, registry.load(_DRIVERS[dialect])(), columns)


def _plain(value: Any) -> Any:
    return orjson.dumps(value).decode() if type(value) is list else value


@contextmanager
def _cursor(connection: Connection, text: str) -> Iterator[Any]:
    driver = connection.connection
    cursor = driver.cursor()
    try:
        yield cursor
    except connection.dialect.loaded_dbapi.Error as error:
        lost = connection.dialect.is_disconnect(error, driver.driver_connection, cursor)
        kind = connection.dialect.loaded_dbapi.Error
        raised = DBAPIError.instance(text, None, error, kind, connection_invalidated=lost, dialect=connection.dialect)
        raise raised from error
    finally:
        cursor.close()
