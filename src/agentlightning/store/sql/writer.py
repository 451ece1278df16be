"""The writer: one thread that owns a writing connection and commits whatever is queued as one group.

Driven by the SQL store, whose methods submit work and await it. A unit of work is (method, argument), where the method is a
function of a transaction and a LIST of arguments: the arguments queued for one method at a time become one call, so that a
hundred concurrent appends are one executemany. One that fails fails alone. Nothing is answered before the commit.

A database that is away is waited for, as long as it asks for. A group whose transaction did not take place is executed
again; where the connection broke during the commit, the database is asked first whether it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection, RootTransaction, Table
from sqlalchemy.exc import DBAPIError

from agentlightning.errors import StoreError
from agentlightning.store.notifier import Notifier, Topic
from agentlightning.store.requests import Request
from agentlightning.store.sql import requests
from agentlightning.store.sql.database import Database
from agentlightning.store.sql.prepared import execute_rows
from agentlightning.store.sql.upsert import upsert

A = TypeVar("A")
R = TypeVar("R")

MAX_GROUP = 1000
"""Most units of work in one transaction."""
MAX_GATHER_S = 0.003
"""While work of several keeps coming, a transaction waits this long for more to join it: a commit costs as much as ten
appends. It does not wait once as much has come as usually does, and work that comes alone does not wait at all."""
USUAL_FADES = 0.9
"""The usual size is the largest of the last groups; each further group counts so much less."""
OPEN_TIMEOUT_S = 10.0
"""Seconds to wait for a database that is away when the store is opened."""
PAUSES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Between attempts to reach a database that is away; the last one is repeated."""


@dataclass(slots=True)
class SqlTransaction:
    """The context of a method: the connection, the time, and whom to wake once it is committed."""

    connection: Connection
    now_ns: int
    news: dict[Topic, int] = field(default_factory=dict)
    _inserts: dict[Table, str] = field(default_factory=dict)

    def insert_new(self, table: Table, rows: list[tuple[Any, ...]]) -> None:
        """Insert rows, in the order of the table's columns without ``seq``; those whose id exists are ignored."""
        if not rows:
            return
        text = self._inserts.get(table)
        if text is None:
            text = self._inserts[table] = _insert(self.connection, table)
        execute_rows(self.connection, text, rows)

    def tell(self, about: str, run_id: str, value: int = 0) -> None:
        """Wake those who wait for this topic, after the commit."""
        self.news[about, run_id] = value


BatchMethod = Callable[[SqlTransaction, Sequence[A]], list[R]]


@dataclass(slots=True, eq=False)
class _SqlWork:
    method: BatchMethod[Any, Any]
    argument: Any
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    since: float
    """time.monotonic() when it was submitted."""
    request: Request | None = None
    """For which it is done: once, whatever comes twice."""
    kind: Any = None
    """Type of the result, if that is what a repeated request gets; None where it may do the same again."""
    result: Any = None
    error: BaseException | None = None


@dataclass(slots=True)
class _Doubtful:
    """A transaction whose commit was cut off: what it told, and whose results it made."""

    news: dict[Topic, int]
    group: list[_SqlWork]


class SqlWriter:
    """The thread. `submit` from any event loop; `stop` once.

    Its transactions are of the `exclusive` kind (one at a time in the whole database, numbered, never executed twice), or
    are made of methods that may be repeated. `now_ns` replaces the clock of the database. `opening` runs before everything
    else, in a transaction of its own; where it fails, so does what was submitted first.
    """

    def __init__(
        self,
        database: Database,
        name: str,
        notifier: Notifier,
        *,
        now_ns: Callable[[], int] | None,
        exclusive: bool = True,
        opening: Callable[[Connection], None] | None = None,
    ) -> None:
        self._database = database
        self._name = name
        self._exclusive = exclusive
        self._opening = opening
        self._engine = database.writer(name)
        self._now_ns = now_ns
        self._notifier = notifier
        self._queue: deque[_SqlWork | None] = deque()
        self._awaited: float = math.inf
        """Length of the queue at which the thread wants to be woken; infinite while it works."""
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inserts: dict[Table, str] = {}
        self._stopped = threading.Event()
        self._connection: Connection | None = None
        self._number = 0
        """Number of the last transaction."""
        self._in_doubt: _Doubtful | None = None
        """The last transaction, where its commit was cut off."""
        self._lost = False
        """The last connection was lost: what is left of it may still be at work."""
        self._prune_at = 0.0
        """time.monotonic() from which the next transaction deletes old requests."""
        self._committed = 0.0
        """time.monotonic() of the last commit."""
        self._crowded = False
        """The last commit was of more than one."""
        self._usual: dict[BatchMethod[Any, Any] | None, float] = {}
        """Size of the larger ones of the last groups, of all and by the method that began them."""
        self.heard: Callable[[float, int], None] | None = None
        """Told of every group: seconds since the first was submitted, and how many they were."""
        self._thread = threading.Thread(target=self._serve, name="store-writer", daemon=True)
        self._thread.start()

    async def submit(
        self, method: BatchMethod[A, R], argument: A, request: Request | None = None, kind: Any = None
    ) -> R:
        """Run the method on this argument in some transaction; returns after its commit, or what was done for the same
        request before. `kind`: the type of a result that is recorded for that."""
        if self._stopped.is_set():  # after the None of `stop` nothing is taken from the queue any more
            raise StoreError("the store is closed; open it first")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._put(_SqlWork(method, argument, future, loop, time.monotonic(), request, kind))
        return await future

    def stop(self) -> None:
        """Finish what was submitted (at once, if the database is away), then end the thread. Blocks."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._put(None)
        self._thread.join()

    def _serve(self) -> None:
        open_for_work = True
        while open_for_work:
            group, open_for_work = self._next_group()
            group = [work for work in group if not work.future.cancelled()]  # not begun, so nobody misses it
            if not group:
                continue
            crowded = len(group) > 1
            # What failed for good keeps its error, is not tried again, and is answered with the others.
            waiting, attempt = group, 0
            while waiting:
                waiting = self._try(waiting)
                if waiting:
                    self._stopped.wait(PAUSES_S[min(attempt, len(PAUSES_S) - 1)])
                    attempt += 1
            # Before the answers: who is answered may submit at once, and is then to be gathered with the others.
            self._committed, self._crowded = time.monotonic(), crowded
            if self.heard is not None:
                self.heard(self._committed - group[0].since, len(group))
            _answer(group)
        self._disconnect()
        self._engine.dispose()  # here, since a connection to memory may be closed by the thread that made it only

    def _try(self, group: list[_SqlWork]) -> list[_SqlWork]:
        """Execute the group; returns those whose turn comes again, since the database is away or chose a victim."""
        try:
            self._execute(self._connected(), group)
        except Exception as error:  # whatever it was, the callers get it, and the thread lives on
            # Any failure ends the connection: what state its transaction is in would be a guess.
            self._disconnect()
            passes = self._database.passes(error)
            # The old session may still be at its commit. Until `_took_place` has asked, nothing is executed again.
            # (Methods of the other kind may be repeated, so nobody has to ask.)
            self._lost = self._lost or (passes and self._exclusive)
            patience_s = self._database.patience_s
            if self._opening is not None:  # perhaps the server just starts; perhaps the URL is wrong
                patience_s = min(patience_s, OPEN_TIMEOUT_S)
            latest = time.monotonic() - patience_s  # each waits from its own submission, not from the group's
            waiting = [work for work in group if passes and work.since > latest and not self._stopped.is_set()]
            if len(waiting) < len(group):
                final = self._final(error)
                for work in set(group).difference(waiting):
                    work.error = final
            return waiting
        return []

    def _final(self, error: Exception) -> Exception:
        if self._in_doubt is None or not isinstance(error, DBAPIError):
            return error  # no commit was under way, so nothing took place
        return StoreError(f"{self._database.explain(error)}; it is not known whether the last change was recorded")

    def _put(self, work: _SqlWork | None) -> None:
        self._queue.append(work)
        # Once for a group, not for each of its items: a thread that wakes takes the interpreter from the event loop.
        if len(self._queue) >= self._awaited or work is None:
            self._awaited = math.inf
            self._wakeups.put(None)

    def _wait(self, count: int, timeout_s: float | None = None) -> None:
        """Returns when so many are queued, at the timeout, or when the thread is to end."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while len(self._queue) < (1 if self._stopped.is_set() else count):
            self._awaited = count
            # Looked at again after it was said: whoever queues from here on sees how many are awaited.
            left_s = deadline - time.monotonic()
            if len(self._queue) >= count or left_s <= 0:
                break
            with contextlib.suppress(queue.Empty):
                self._wakeups.get(timeout=None if timeout_s is None else left_s)
        self._awaited = math.inf

    def _next_group(self) -> tuple[list[_SqlWork], bool]:
        """Everything that is queued, up to a bound; waits for the first. False once stopped."""
        self._wait(1)
        # Waiting for more pays only while several callers write: then those of the last group, answered a moment ago, are
        # about to submit again. One caller alone would only be delayed.
        first = self._queue[0]
        if first is not None and self._crowded and time.monotonic() - self._committed < MAX_GATHER_S:
            # As many as usual are enough: the rest would come after the deadline anyway.
            self._wait(int(min(self._usual.get(first.method, MAX_GROUP), self._usual[None])), MAX_GATHER_S)
        group: list[_SqlWork] = []
        while self._queue and len(group) < MAX_GROUP:
            work = self._queue.popleft()
            if work is None:
                return group, False
            group.append(work)
        for kind in (group[0].method, None):
            self._usual[kind] = max(len(group), USUAL_FADES * self._usual.get(kind, 0.0))
        return group, True

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = self._engine.connect()
        if self._opening is not None:  # on each connection until it succeeded once
            with self._connection.begin():
                self._opening(self._connection)
            self._opening = None
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(DBAPIError):  # its rollback needs the server that is away
                connection.close()

    def _execute(self, connection: Connection, group: list[_SqlWork]) -> None:
        """One transaction, or none if it took place already; raises where the database refused it as a whole."""
        if self._lost and self._took_place(connection, group):
            return
        # Savepoints cost as much as an append: they are for groups in which something failed.
        if not self._commit(connection, group, careful=False):
            self._commit(connection, group, careful=True)

    def _took_place(self, connection: Connection, group: list[_SqlWork]) -> bool:
        """On a new connection after one was lost: whether the group's work is done, results and all."""
        # The last transaction wrote a row under its number. The old session is ended first, and its lock waited for, so
        # that it can no longer write behind our back.
        with connection.begin():
            self._database.end_predecessor(connection, self._name)
            committed = bool(requests.read(connection, [self._transaction_key]))
        self._lost = False
        doubtful, self._in_doubt = self._in_doubt, None
        if doubtful is None or not committed:
            return False
        self._notifier.notify(doubtful.news)  # `_finish` did not come to it
        # Work that is tried again has the results that its methods made before the commit. A new group comes here where all
        # of the doubtful one was given up meanwhile: it has none, and is executed.
        return set(group) <= set(doubtful.group)

    def _commit(self, connection: Connection, group: list[_SqlWork], *, careful: bool) -> bool:
        """Run all methods and commit; False where one failed and they have to be run again, carefully."""
        for work in group:
            work.result = work.error = None
        self._number += 1  # also where it fails below: a number is never written by two transactions
        with connection.begin() as root:
            entered_ns = self._database.enter(connection, self._exclusive)
            # Read after the lock: times of one database so never run backwards between its transactions.
            now_ns = entered_ns if self._now_ns is None else self._now_ns()
            transaction = SqlTransaction(connection, now_ns, _inserts=self._inserts)
            try:
                self._run(transaction, group, careful)
            except Exception as error:
                if careful or self._database.passes(error):
                    raise  # not one method's fault: the whole group is tried again, or fails
                root.rollback()
                if len(group) == 1:  # there is nobody else to be saved by a second, careful run
                    group[0].error = error
                return len(group) == 1
            if transaction.news:  # within the transaction: other processes are notified if and only if it is committed
                self._database.tell(connection, self._name, transaction.news)
            self._finish(root, transaction, group)
        return True

    @property
    def _transaction_key(self) -> str:
        return f"transaction {self._name} {self._number}"

    def _run(self, transaction: SqlTransaction, group: list[_SqlWork], careful: bool) -> None:
        """Do what was not done before for the same request, and record what is done."""
        connection, now_ns = transaction.connection, transaction.now_ns
        asked = {work.request.key: work for work in reversed(group) if work.request is not None}
        known = requests.read(connection, list(asked)) if asked else {}
        # By method, not in the order of the queue: who awaits its methods one by one is never in a group twice, and of
        # different callers no order is promised.
        by_method: dict[BatchMethod[Any, Any], list[_SqlWork]] = defaultdict(list)
        again: list[_SqlWork] = []
        for work in group:
            if work.request is not None and asked[work.request.key] is not work:
                again.append(work)  # sent again while the first is still here
            elif work.request is None or not requests.answer(work, work.request, known.get(work.request.key)):
                by_method[work.method].append(work)
        for works in by_method.values():
            _run(transaction, works, careful)
        rows = [
            requests.row(work, work.request, now_ns) for key, work in asked.items() if key not in known and work.request
        ]
        if self._exclusive and self._database.remote:
            rows.append({"key": self._transaction_key, "digest": b"", "outcome": None, "created_ns": now_ns})
        requests.write(connection, [row for row in rows if row is not None])
        for work in again:
            assert work.request is not None
            first = asked[work.request.key]
            work.result, work.error = first.result, first.error
        if self._exclusive and time.monotonic() > self._prune_at:
            requests.prune(connection, now_ns)
            self._prune_at = time.monotonic() + requests.PRUNE_EVERY_S

    def _finish(self, root: RootTransaction, transaction: SqlTransaction, group: list[_SqlWork]) -> None:
        # Set before the commit: an exception out of it does not say whether the server had already written it.
        self._in_doubt = _Doubtful(transaction.news, group)
        try:
            root.commit()
        except Exception as error:
            if not (self._exclusive and self._database.passes(error)):
                self._in_doubt = None  # the database refused it (a full disk, a constraint): it did not take place
            raise
        self._in_doubt = None
        if transaction.news:
            self._notifier.notify(transaction.news)


def _run(transaction: SqlTransaction, works: list[_SqlWork], careful: bool) -> None:
    """One call of the method for all works; carefully: where that fails one for each, so that only the culprits fail."""
    savepoint = transaction.connection.begin_nested() if careful else None
    try:
        results = works[0].method(transaction, [work.argument for work in works])
    except Exception as error:  # handed to the caller, who awaits it
        if savepoint is None or not _alive(transaction.connection):
            raise  # without a transaction there is nothing to go back to
        savepoint.rollback()
        if len(works) == 1:
            works[0].error = error
            return
        for work in works:  # once more, one by one: a batch of a hundred does not fail for one bad row
            _run(transaction, [work], careful)
    else:
        if savepoint is not None:
            savepoint.commit()
        for work, result in zip(works, results, strict=True):
            work.result = result


def _alive(connection: Connection) -> bool:
    """False where the transaction is over: SQLite gives it up on a full disk or an I/O error, a server that is away too."""
    return not connection.invalidated and bool(getattr(connection.connection.driver_connection, "in_transaction", True))


def _insert(connection: Connection, table: Table) -> str:
    columns = [column.name for column in table.columns if column.name != "seq"]
    statement = upsert(connection, table).on_conflict_do_nothing(index_elements=["id"] if "id" in columns else None)
    return str(statement.compile(dialect=connection.dialect, column_keys=columns))


def _answer(group: list[_SqlWork]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_SqlWork]] = defaultdict(list)
    for work in group:
        by_loop[work.loop].append(work)
    for loop, works in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
            loop.call_soon_threadsafe(_settle, works)


def _settle(works: list[_SqlWork]) -> None:
    for work in works:
        if work.future.done():
            continue
        if work.error is not None:
            work.future.set_exception(work.error)
        else:
            work.future.set_result(work.result)
