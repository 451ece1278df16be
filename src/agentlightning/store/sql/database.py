"""A database under the SQL store: what differs between SQLite and PostgreSQL, and statements executed on the driver itself.

Driven by the SQL store and its writers. A database knows how to connect, how a transaction begins, what its failures mean
and which of them pass by themselves; the methods and the tables know none of it.

Prepared statements are SQLAlchemy's constructs, compiled once and executed on the driver's own cursor: what SQLAlchemy does
around each execution costs several times what SQLite needs for the statement. Lists are one parameter, `ids`.
"""

from __future__ import annotations

import abc
import functools
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
from sqlalchemy import Connection, Dialect, Engine, Executable, Table, event
from sqlalchemy.dialects import postgresql, registry, sqlite
from sqlalchemy.exc import DBAPIError

from agentlightning.errors import AgentLightningError
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.waiting import Notifier, Topic

MAX_READ_S = 60.0
"""Seconds that one read may take; ``?read_timeout=`` in the URL says otherwise. Long lists are read in pages."""

TOO_LONG = "a read took longer than it may, and was ended; read less at a time, or set ?read_timeout=SECONDS in the URL"


class Database(abc.ABC):
    """A database with the data. The defaults are those of a database in this process, which is never away."""

    name: str  # its name in sentences
    readers: int = 2  # threads of each pool that reads beside the writer; 0 where only the writer has the data
    shared = False  # servers on several machines may use it at a time
    appends_apart: bool = False  # appends of records run beside the other methods, on a connection of their own
    remote = False  # a connection may be lost during a commit, so that nobody knows whether it took place
    patience_s: float = 0.0  # seconds that methods wait for a database that is away

    @abc.abstractmethod
    def writer(self, name: str) -> Engine:
        """The engine of the writing thread of this name: `begin` begins, nothing else does."""

    @abc.abstractmethod
    def reader(self) -> Engine:
        """An engine for `readers` threads, whose reads end after the time that they may take."""

    def now_ns(self) -> int:
        """The time by the clock that all users of this database share, roughly: for what is only sorted by time."""
        return time.time_ns()

    @abc.abstractmethod
    def explain(self, error: DBAPIError) -> AgentLightningError:
        """The sentence for a failure, with the name of the database and what to do."""

    def enter(self, connection: Connection, exclusive: bool) -> int:
        """Called first in each transaction; the time. Exclusive ones run one at a time."""
        return self.now_ns()

    def enter_schema(self, connection: Connection) -> None:  # noqa: B027 - BEGIN may be enough
        """Called first in the transaction that creates the schema: nobody else does so meanwhile."""

    def tell(self, connection: Connection, writer: str, news: Mapping[Topic, int]) -> None:  # noqa: B027 - nobody else
        """Called last in a transaction that notifies: other processes get its notifications when it is committed."""

    def end_predecessor(self, connection: Connection, writer: str) -> None:  # noqa: B027 - none is ever lost
        """First on a new connection after one was lost: ends the writer's old session."""

    def sync(self) -> None:  # noqa: B027 - most commits wait for the disk themselves
        """Have all that was committed on the disk before returning."""

    def passes(self, error: Exception) -> bool:
        """True where the same transaction may succeed later, because the database was away or chose a victim."""
        return False

    def listen(self, notifier: Notifier, writer: str, background: BackgroundTasks) -> Callable[[], None] | None:
        """Notify for the commits of other processes; returns what ends that. Blocks until it listens. Failures go to
        `background`."""
        return None


def begin_by(engine: Engine, statement: str) -> Engine:
    """The engine, whose transactions begin by this statement; the driver begins nothing by itself."""

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(statement)

    return engine


# --- statements -------------------------------------------------------------------------------------------------------

MAX_ROWS_PER_INSERT = 64
"""A power of two: the driver keeps a prepared statement for each up to it."""

Row = Any  # a named tuple of the statement's columns
Upsert = sqlite.Insert | postgresql.Insert

_IDS = " IN (__[POSTCOMPILE_ids])"
_AMONG = {"sqlite": " IN (SELECT value FROM json_each(?))", "postgresql": " = ANY(%(ids)s)"}
"""SQLAlchemy's notation for a list of parameters, and that of each dialect for a parameter that is a list."""
_DRIVERS = {"sqlite": "sqlite.pysqlite", "postgresql": "postgresql.psycopg"}


def upsert(connection: Connection, table: Table) -> Upsert:
    """An INSERT into the table for this connection's dialect, still without its conflict clause."""
    return upsert_into(connection.dialect.name, table)


def upsert_into(dialect: str, table: Table) -> Upsert:
    """The same, for the dialect of this name."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def insert_new(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Inserts rows, in the order of the table's columns without ``seq``; those whose id exists are ignored."""
    dialect, at = connection.dialect.name, 0
    if dialect != "sqlite":
        if rows:
            execute_rows(connection, _insert(dialect, table), rows)
        return
    # As few statements as possible: its driver gives up the interpreter at each row of an executemany, and then waits for
    # the event loop to give it back.
    while left := len(rows) - at:
        count = min(MAX_ROWS_PER_INSERT, 1 << (left.bit_length() - 1))
        text = _insert(dialect, table, count)
        with _cursor(connection, text) as cursor:
            cursor.execute(text, [value for row in rows[at : at + count] for value in row])
        at += count


def execute(connection: Connection, statement: Executable, given: Mapping[str, Any]) -> list[Row]:
    """Runs the statement with these parameters; its rows, where it has any."""
    prepared = _prepare(statement, connection.dialect.name, ())
    with _cursor(connection, prepared.text) as cursor:
        cursor.execute(prepared.text, prepared.arguments(given))
        return prepared.rows(cursor) if cursor.description is not None else []


def execute_many(connection: Connection, statement: Executable, given: Sequence[Mapping[str, Any]]) -> None:
    """Runs an INSERT or UPDATE of the columns that the first of these parameters names, once for each."""
    if given:
        prepared = _prepare(statement, connection.dialect.name, tuple(given[0]))
        execute_rows(connection, prepared.text, [prepared.arguments(each) for each in given])


def execute_rows(connection: Connection, text: str, rows: Sequence[Any]) -> None:
    """Runs a statement in the driver's own words, once for each of these parameters."""
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
        values = [given[name] if name in given else self._defaults[name] for name in self._order]
        return tuple(orjson.dumps(value).decode() if type(value) is list else value for value in values)

    def rows(self, cursor: Any) -> list[Row]:
        if self._make is None:
            columns = [column[0] for column in cursor.description]
            self._make = getattr(namedtuple("Row", columns), "_make")  # noqa
        return list(map(self._make, cursor.fetchall()))


@functools.cache
def _insert(dialect: str, table: Table, rows: int = 1) -> str:
    columns = [column.name for column in table.columns if column.name != "seq"]
    statement = upsert_into(dialect, table).on_conflict_do_nothing(index_elements=["id"] if "id" in columns else None)
    positional = registry.load(_DRIVERS[dialect])(paramstyle="format" if dialect == "postgresql" else "qmark")
    text = str(statement.compile(dialect=positional, column_keys=columns))
    one_row = f"({', '.join('?' * len(columns))})"
    return text.replace(one_row, ", ".join([one_row] * rows))


@functools.cache
def _prepare(statement: Executable, dialect: str, columns: tuple[str, ...]) -> _Prepared:
    return _Prepared(statement, registry.load(_DRIVERS[dialect])(), columns)


@contextmanager
def _cursor(connection: Connection, text: str) -> Iterator[Any]:
    """A cursor of the driver, whose errors are raised as SQLAlchemy's."""
    driver, kind = connection.connection, connection.dialect.loaded_dbapi.Error
    cursor = driver.cursor()
    try:
        yield cursor
    except kind as error:
        lost = connection.dialect.is_disconnect(error, driver.driver_connection, cursor)
        raise DBAPIError.instance(
            text, None, error, kind, connection_invalidated=lost, dialect=connection.dialect
        ) from error
    finally:
        cursor.close()
