"""A database under the SQL store: what differs between SQLite and PostgreSQL, behind one interface.

Driven by the SQL store and its writers. A kind of database knows how to connect, how a transaction begins, what its failures
mean in plain words and which of them pass by themselves; the methods and the tables know none of it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from agentlightning.config.run import without_password
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.notifier import Notifier, Topic

EXPECTED = "memory://, sqlite:///path or postgresql://user:password@host/database"

MAX_READ_S = 60.0
"""Seconds that one read may take; ``?read_timeout=`` in the URL says otherwise. Long lists are read in pages."""

TOO_LONG = "a read took longer than it may, and was ended; read less at a time, or set ?read_timeout=SECONDS in the URL"

Now = Callable[[], int]


class Database(abc.ABC):
    """A database with the data. The defaults are those of a database in this process, which is never away."""

    name: str
    """Its name in sentences."""
    readers: int = 2
    """Threads of each pool that reads beside the writer; 0 where only the writer has the data."""
    shared = False
    """Servers on several machines may use it at a time."""
    appends_apart: bool = False
    """Appends of records run beside the other methods, on a connection of their own."""
    remote = False
    """A connection may be lost while a commit is under way, so that nobody knows whether it took place."""
    patience_s: float = 0.0
    """Seconds that methods wait for a database that is away."""

    @abc.abstractmethod
    def writer(self, name: str) -> Engine:
        """The engine of the writing thread of this name: `begin` begins, nothing else does."""

    @abc.abstractmethod
    def reader(self) -> Engine:
        """An engine for as many threads as `readers` says, whose reads end after the time that they may take."""

    @abc.abstractmethod
    def now_ns(self) -> int:
        """The time by the clock that all who use this database share, roughly: for what is only sorted by time."""

    @abc.abstractmethod
    def explain(self, error: DBAPIError) -> AgentLightningError:
        """The sentence for a failure, with the name of the database and what to do."""

    def enter(self, connection: Connection, exclusive: bool) -> int:
        """Called first in each transaction; the time. Of those that are exclusive there is one at a time."""
        return self.now_ns()

    def enter_schema(self, connection: Connection) -> None:  # noqa: B027 - BEGIN may be enough
        """Called first in the transaction that creates the schema: nobody else does so meanwhile."""

    def tell(self, connection: Connection, writer: str, news: Mapping[Topic, int]) -> None:  # noqa: B027 - nobody else
        """Called last in a transaction that notifies: other processes get its notifications when it is committed."""

    def end_predecessor(self, connection: Connection, writer: str) -> None:  # noqa: B027 - none is ever lost
        """First on a new connection after one was lost: what is left of the writer's old session is over."""

    def sync(self) -> None:  # noqa: B027 - most commits wait for the disk themselves
        """Have all that was committed on the disk before returning."""

    def passes(self, error: Exception) -> bool:
        """True where the same transaction may succeed later, because the database was away or chose a victim."""
        return False

    def listen(self, notifier: Notifier, writer: str, background: BackgroundTasks) -> Callable[[], None] | None:
        """Notify for what other processes tell; returns what ends that. Blocks until it listens. `background` is told
        where that fails."""
        return None


def database_at(url: str) -> Database:
    """The database at a URL; ConfigError where it is none, MissingExtraError where its driver is not installed."""
    from agentlightning.store.sql.sqlite import SqliteDatabase

    if url == "memory://":
        return SqliteDatabase(make_url("sqlite://"))
    scheme = url.partition("://")[0]
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigError(f"store: expected {EXPECTED}, got {without_password(url)!r}") from None
    if scheme == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return SqliteDatabase(parsed)
    if scheme in ("postgresql", "postgres"):
        from agentlightning.store.sql.postgres import PostgresDatabase

        return PostgresDatabase(parsed)
    raise ConfigError(f"store: expected {EXPECTED}, got {without_password(url)!r}")
