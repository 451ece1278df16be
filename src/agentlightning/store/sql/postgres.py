"""PostgreSQL: engines, what begins a transaction, what its failures mean, and notifications between processes.

Transactions that change the life of rollouts hold one advisory lock, so that they are serial as in SQLite and a waiter sees
places in the order of commits; appends run beside them. docs/store.md says why it is not SKIP LOCKED, with figures.

A connection may break during a commit. So that nothing is executed twice, each such transaction writes a row of its own
into ``requests``: once the lock is ours again, the old transaction is over, and the row says how it ended. (pg_xact_status
cannot: after a crash of the server the number of a transaction that was lost is given to another.)
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.pool import NullPool

from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ConflictError,
    InputError,
    MissingExtraError,
    StoreError,
)
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.codec import portions
from agentlightning.store.sql.database import MAX_READ_S, TOO_LONG, Database, begin_by
from agentlightning.store.urls import seconds_in_url
from agentlightning.store.waiting import Notifier, Topic

try:
    import psycopg
except ModuleNotFoundError as missing:
    raise MissingExtraError("psycopg", "postgres") from missing

MAX_OUTAGE_S = 60.0  # seconds that methods wait for a server that is away; ``?patience=`` in the URL says otherwise
LOCK_TIMEOUT_S = 10.0  # seconds to wait for another's lock; ``?timeout=`` in the URL says otherwise
CHANNEL = "agl"
LISTENER = "postgresql listener"
LISTEN_PAUSE_S = 0.2  # between attempts to listen again
LOCK = 0x61676C  # "agl"; advisory locks belong to one database
MAX_PAYLOAD_BYTES = 6000  # size of one notification; the server takes less than 8000

# A client that hangs, is dead or cannot be reached must not hold the lock as long as others wait for it.
_SESSION = "-c idle_in_transaction_session_timeout=5s -c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 \
-c tcp_keepalives_count=3 -c synchronous_commit=on -c client_min_messages=warning"
_TCP = {"connect_timeout": 5, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
_TCP_MS = {"tcp_user_timeout": 10_000}

_LOCK = text("SELECT pg_advisory_xact_lock(:lock), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
_END_PREDECESSOR = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE application_name = :name AND datname = current_database() AND pid <> pg_backend_pid()"
)
_NOTIFY = text("SELECT pg_notify(:channel, :payload)")


class PostgresDatabase(Database):
    """A database of a PostgreSQL server."""

    shared = True
    remote = True
    appends_apart = True

    def __init__(self, url: URL) -> None:
        query = dict(url.query)
        self.patience_s = seconds_in_url("patience", query.pop("patience", MAX_OUTAGE_S))
        lock_s = seconds_in_url("timeout", query.pop("timeout", LOCK_TIMEOUT_S))
        self._read_s = seconds_in_url("read_timeout", query.pop("read_timeout", MAX_READ_S))
        given = str(query.pop("options", ""))
        self._options = f"{_SESSION} -c lock_timeout={int(lock_s * 1000)} {given}"
        self._url = url.set(drivername="postgresql+psycopg", query=query)
        if not url.database:
            raise ConfigError(f"store: expected postgresql://user:password@host/database, got {url!r}")
        port = f":{url.port}" if url.port else ""
        self.name = f"postgresql://{url.host or 'localhost'}{port}/{url.database}"
        self._ahead_ns: int | None = None

    def writer(self, name: str) -> Engine:
        return self._engine("BEGIN", {"application_name": f"agl {name}"}, poolclass=NullPool)

    def reader(self) -> Engine:
        bounded = {"options": f"-c statement_timeout={max(1, int(self._read_s * 1000))} {self._options}"}
        return self._engine("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", bounded, pool_size=self.readers)

    def now_ns(self) -> int:
        return time.time_ns() if self._ahead_ns is None else self._ahead_ns + time.monotonic_ns()

    def enter(self, connection: Connection, exclusive: bool) -> int:
        if not exclusive:
            return self.now_ns()
        now_ns = int(connection.execute(_LOCK, {"lock": LOCK}).one()[1]) * 1000
        self._ahead_ns = now_ns - time.monotonic_ns()
        return now_ns

    def enter_schema(self, connection: Connection) -> None:
        self.enter(connection, exclusive=True)

    def tell(self, connection: Connection, writer: str, news: Mapping[Topic, int]) -> None:
        for payload in _payloads(writer, news):
            connection.execute(_NOTIFY, {"channel": CHANNEL, "payload": payload})

    def end_predecessor(self, connection: Connection, writer: str) -> None:
        connection.execute(_END_PREDECESSOR, {"name": f"agl {writer}"})  # it may still hold the lock
        connection.execute(_LOCK, {"lock": LOCK})  # granted when the old transaction is over

    def passes(self, error: Exception) -> bool:
        if not isinstance(error, DBAPIError):
            return False
        state = getattr(error.orig, "sqlstate", None)
        if state is not None:
            return state in _PASSING or state.startswith("08")
        if error.connection_invalidated:
            return True
        said = str(error.orig).lower()
        return isinstance(error, OperationalError) and not any(symptom in said for symptom in _REFUSED)

    def listen(self, notifier: Notifier, writer: str, background: BackgroundTasks) -> Callable[[], None]:
        try:
            return _Listener(self._connect, notifier, writer, background).stop
        except psycopg.Error as error:
            raise OperationalError("LISTEN", None, error) from error

    def explain(self, error: DBAPIError) -> AgentLightningError:
        reason = _reason(error)
        state = getattr(error.orig, "sqlstate", None) or ""
        if isinstance(error, IntegrityError):
            return ConflictError(f"{self.name}: the change contradicts what is recorded: {reason}")
        if state[:2] == "22" or "NUL" in reason:
            return InputError(f"{self.name}: expected text without NUL characters and integers of 64 bits: {reason}")
        if state in _SENTENCES:
            return StoreError(f"{self.name}: {_SENTENCES[state]} ({reason})")
        said = reason.lower()
        for symptom, sentence in _REFUSED.items():
            if not state and symptom in said:
                return StoreError(f"{self.name}: {sentence} ({reason})")
        if self.passes(error):
            return StoreError(
                f"{self.name}: cannot be reached; start the server, or check host, port and network: "
                f"what was acknowledged is kept ({reason})"
            )
        return StoreError(f"{self.name}: the database failed: {reason}")

    def _engine(self, begin: str, session: dict[str, str], **pool: Any) -> Engine:
        arguments = {**self._arguments(), **session}
        engine = create_engine(self._url, use_native_hstore=False, paramstyle="format", connect_args=arguments, **pool)
        return begin_by(engine, begin)

    def _arguments(self) -> dict[str, Any]:
        """Settings of a connection, for libpq. The driver begins nothing by itself: BEGIN is ours."""
        return {**_TCP, **_TCP_MS, "options": self._options, "autocommit": True}

    def _connect(self) -> psycopg.Connection[Any]:
        plain = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(plain, **self._arguments())


class _Listener:
    """A thread that receives what other processes commit, from the constructor until `stop`.

    A notification is a hint, never data. While the connection is away nothing comes, so everybody is woken when it is back.
    psycopg.Error where the first connection fails.
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        notifier: Notifier,
        writer: str,
        background: BackgroundTasks,
    ) -> None:
        self._connect = connect
        self._background = background
        self._notifier = notifier
        self._writer = writer
        self._stopped, self._stop = socket.socketpair()
        self._thread = threading.Thread(
            target=self._serve, args=[self._listening()], name="store-listener", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Blocks."""
        self._stop.send(b".")
        self._thread.join()
        self._stop.close()
        self._stopped.close()

    def _listening(self) -> psycopg.Connection[Any]:
        connection = self._connect()
        try:
            connection.execute(f"LISTEN {CHANNEL}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _serve(self, connection: psycopg.Connection[Any] | None) -> None:
        going = True
        while going:
            try:
                if connection is None:
                    connection = self._listening()
                    self._notifier.notify_all()  # notifications were missed meanwhile
                going = self._receive(connection)
            except (psycopg.Error, OSError):  # the server is away, as every method will say
                going = not self._ready(None, LISTEN_PAUSE_S)
            except Exception as error:  # as what somebody else says on the channel
                self._background.failed(LISTENER, error)
                going = not self._ready(None, LISTEN_PAUSE_S)
                self._background.running(LISTENER)
            if connection is not None:
                connection.close()
                connection = None

    def _receive(self, connection: psycopg.Connection[Any]) -> bool:
        """Notify for each notification; False when stopped. Raises psycopg.Error when the connection is lost."""
        while True:
            for received in connection.notifies(timeout=0):
                writer, news = orjson.loads(received.payload)
                if writer != self._writer:  # this process has notified already
                    self._notifier.notify({(about, run_id): value for about, run_id, value in news})
            if self._ready(connection):
                return False

    def _ready(self, connection: psycopg.Connection[Any] | None, timeout_s: float | None = None) -> bool:
        """Wait until the connection has something to read, or `timeout_s`; True when stopped."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stopped, selectors.EVENT_READ)
            if connection is not None:
                selector.register(connection.fileno(), selectors.EVENT_READ)
            return any(key.fileobj is self._stopped for key, _ in selector.select(timeout_s))


def _payloads(writer: str, news: Mapping[Topic, int]) -> list[str]:
    """JSON: [writer, [[about, run, value], …]], in as many pieces as notifications need."""
    listed = [(about, run_id, value) for (about, run_id), value in news.items()]
    parts = portions(listed, lambda each: len(each[0]) + len(each[1]) + 32, MAX_PAYLOAD_BYTES)
    return [orjson.dumps([writer, part]).decode() for part in parts]


def _reason(error: DBAPIError) -> str:
    said = getattr(getattr(error.orig, "diag", None), "message_primary", None) or str(error.orig)
    return " ".join(str(said).split())


_PASSING = {
    "40001",  # serialization_failure
    "40P01",  # deadlock_detected
    "57P01",  # admin_shutdown
    "57P02",  # crash_shutdown
    "57P03",  # cannot_connect_now: it starts, stops or recovers
    "57P05",  # idle_session_timeout
    "25P03",  # idle_in_transaction_session_timeout
    "53300",  # too_many_connections
}

_SENTENCES = {
    "57014": TOO_LONG,
    "53100": "the disk of the server is full; free some space and go on: what was acknowledged is kept",
    "25006": "the server is read-only, as a standby is; name the primary in the URL",
    "55P03": "another process holds the store's lock for too long; end it, or wait and try again",
    "42501": "the user may not do this; GRANT it the rights to create and change tables in its schema",
    "53300": "the server has no connection left; raise its max_connections, or end others",
    "57P03": "the server starts, stops or recovers; wait and try again",
}
"""By SQLSTATE: what an established connection says."""

_REFUSED = {
    "password authentication failed": "wrong user or password; correct them in the URL",
    "no password supplied": "it asks for a password; write it into the URL, or into PGPASSWORD",
    "does not exist": "there is no such database or user; create it, or correct the URL",
    "pg_hba.conf": "the server lets nobody in from here; change its pg_hba.conf, or use another host or user",
    "could not translate host name": "no machine of this name is known; correct the host in the URL",
    "failed to resolve host": "no machine of this name is known; correct the host in the URL",
    "permission denied for database": "the user may not connect; GRANT it CONNECT on the database",
}
"""By a part of what the server or libpq said when it was asked for a connection, which has no SQLSTATE."""
