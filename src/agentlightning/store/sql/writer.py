"""The writer: one thread that owns a writing connection and commits whatever is queued as one group.

A unit of work is (method, argument), where the method is a function of a transaction and a LIST of arguments: those queued
for one method at a time become one call, so that a hundred concurrent appends are one executemany. One that fails fails
alone. Nothing is answered before the commit. A database that is away is waited for. A group whose transaction did not take
place is executed again; where the connection broke during the commit, the database is asked first whether it did. Work for a
request (store/request.py) is done once: its outcome is a row that the same transaction writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, RootTransaction, bindparam, delete, select
from sqlalchemy.exc import DBAPIError

from agentlightning.errors import AgentLightningError, StoreError
from agentlightning.store.request import REQUEST_KEPT_S, Request, check_same
from agentlightning.store.sql.database import Database, Row, execute, insert_new
from agentlightning.store.sql.tables import requests
from agentlightning.store.waiting import Notifier, Topic

A = TypeVar("A")
R = TypeVar("R")

MAX_GROUP = 1000  # most units of work in one transaction
MAX_GATHER_S = 0.003
"""While work of several keeps coming, a transaction waits this long for more to join it: a commit costs as much as ten
appends. It does not wait once as much has come as usually does, and work that comes alone does not wait at all."""
USUAL_FADES = 0.9  # the usual size is the largest of the last groups; each further group counts so much less
OPEN_TIMEOUT_S = 10.0  # seconds to wait for a database that is away when the store is opened
PAUSES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Between attempts to reach a database that is away; the last one is repeated."""
PRUNE_EVERY_S = 60.0  # seconds after which outcomes of old requests are deleted again


@dataclass(slots=True)
class SqlTransaction:
    """The context of a method: the connection, the time, and whom to wake once it is committed."""

    connection: Connection
    now_ns: int
    news: dict[Topic, int] = field(default_factory=dict)

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
    since: float  # time.monotonic() when it was submitted
    request: Request | None = None  # for which it is done once; None where it may be repeated
    kind: Any = None  # type of the result, which a repeated request gets
    result: Any = None
    error: BaseException | None = None
    done: bool = False  # committed, or failed for good


@dataclass(slots=True)
class _Doubtful:
    """A transaction whose commit was cut off: its notifications, and the work of which it has the results."""

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
        self._stopped = threading.Event()
        self._connection: Connection | None = None
        self._number = 0  # number of the last transaction
        self._in_doubt: _Doubtful | None = None  # the last transaction, where its commit was cut off
        self._lost = False  # the last connection was lost: what is left of it may still be at work
        self._prune_at = 0.0  # time.monotonic() from which the next transaction deletes old requests
        self._committed = 0.0  # time.monotonic() of the last commit
        self._crowded = False  # the last commit was of more than one
        self._usual: dict[BatchMethod[Any, Any], float] = {}
        """Size of the larger ones of the last groups, by the method that began them."""
        self.heard: Callable[[float, int], None] | None = None
        """Called with every group: seconds since the first was submitted, and how many they were."""
        self._thread = threading.Thread(target=self._serve, name="store-writer", daemon=True)
        self._thread.start()

    async def submit(
        self, method: BatchMethod[A, R], argument: A, request: Request | None = None, kind: Any = None
    ) -> R:
        """Run the method on this argument in some transaction; returns after its commit, or the outcome of the same request
        before. `kind`: the type of the result; None where a repeated request may do the same again."""
        if self._stopped.is_set():  # after the None of `stop` nothing is taken from the queue any more
            raise StoreError("the store is closed; open it first")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        request = None if kind is None else request
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
            if not group:
                continue
            waiting, attempt = group, 0
            while waiting := self._try(waiting):
                self._stopped.wait(PAUSES_S[min(attempt, len(PAUSES_S) - 1)])
                attempt += 1
            # Before the answers: who is answered may submit at once, and is then to be gathered with the others.
            self._committed, self._crowded = time.monotonic(), len(group) > 1
            if self.heard is not None:
                self.heard(self._committed - group[0].since, len(group))
            _answer(group)
        self._disconnect()
        self._engine.dispose()  # here, since a connection to memory may be closed by the thread that made it only

    def _try(self, group: list[_SqlWork]) -> list[_SqlWork]:
        """Execute the group; returns those whose turn comes again, since the database is away or chose a victim."""
        try:
            connection = self._connection
            if connection is None or connection.closed or self._opening is not None:
                connection = self._connect()
            self._execute(connection, group)
        except Exception as error:  # whatever it was, the callers get it, and the thread lives on
            # Any failure ends the connection: what state its transaction is in would be a guess.
            self._disconnect()
            passes = self._database.passes(error)
            # The old session may still be at its commit. Until `_resolve_doubt` has asked, nothing is executed again.
            # (Methods of the other kind may be repeated, so nobody has to ask.)
            self._lost = self._lost or (passes and self._exclusive)
            patience_s = self._database.patience_s
            if self._opening is not None:  # perhaps the server just starts; perhaps the URL is wrong
                patience_s = min(patience_s, OPEN_TIMEOUT_S)
            latest = time.monotonic() - patience_s  # each waits from its own submission, not from the group's
            final = self._final(error)
            for work in group:
                if not work.done and not (passes and work.since > latest and not self._stopped.is_set()):
                    work.error, work.done = final, True
            return [work for work in group if not work.done]
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
            self._wait(int(self._usual.get(first.method, 1)), MAX_GATHER_S)  # the rest would miss the deadline anyway
        group: list[_SqlWork] = []
        while self._queue and len(group) < MAX_GROUP:
            work = self._queue.popleft()
            if work is None:
                return group, False
            if not work.future.cancelled():  # else it is not begun, so nobody misses it
                group.append(work)
        if group:
            method = group[0].method
            self._usual[method] = max(len(group), USUAL_FADES * self._usual.get(method, 0.0))
        return group, True

    def _connect(self) -> Connection:
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
        """One transaction, or several where one of the group fails; raises where the database refused it as a whole."""
        if self._lost:
            self._resolve_doubt(connection)
            group = [work for work in group if not work.done]
        parts = [group]
        while parts:
            part = parts.pop()
            if part and not self._commit(connection, part):
                # By halves, until who fails is alone: a batch of a hundred does not fail for one bad row.
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]

    def _resolve_doubt(self, connection: Connection) -> None:
        """On a new connection after one was lost: finds out whether the last commit took place."""
        # The last transaction wrote a row under its number. The old session is ended first, and its lock waited for, so
        # that it can no longer write behind our back.
        with connection.begin():
            self._database.end_predecessor(connection, self._name)
            committed = bool(_read_requests(connection, [self._transaction_key]))
        self._lost = False
        doubtful, self._in_doubt = self._in_doubt, None
        if doubtful is not None and committed:
            self._notifier.notify(doubtful.news)  # `_finish` did not come to it
            for work in doubtful.group:  # they have the results that their methods made before the commit
                work.done = True

    def _commit(self, connection: Connection, part: list[_SqlWork]) -> bool:
        """Run all methods and commit; False where one failed and the part is to be split."""
        for work in part:
            work.result = work.error = None
        self._number += 1  # also where it fails below: a number is never written by two transactions
        with connection.begin() as root:
            entered_ns = self._database.enter(connection, self._exclusive)
            # Read after the lock: times of one database so never run backwards between its transactions.
            transaction = SqlTransaction(connection, entered_ns if self._now_ns is None else self._now_ns())
            try:
                self._run(transaction, part)
            except Exception as error:
                if self._database.passes(error):
                    raise  # not one method's fault: the whole group is tried again, or fails
                root.rollback()
                if len(part) == 1:
                    part[0].error, part[0].done = error, True
                return len(part) == 1
            if transaction.news:  # within the transaction: other processes are notified if and only if it is committed
                self._database.tell(connection, self._name, transaction.news)
            self._finish(root, transaction, part)
        return True

    @property
    def _transaction_key(self) -> str:
        return f"transaction {self._name} {self._number}"

    def _run(self, transaction: SqlTransaction, part: list[_SqlWork]) -> None:
        """Do what was not done before for the same request, and record what is done."""
        connection, now_ns = transaction.connection, transaction.now_ns
        asked: dict[str, _SqlWork] = {}
        for work in part:
            if work.request is not None:
                asked.setdefault(work.request.key, work)
        known = _read_requests(connection, list(asked)) if asked else {}
        # By method, not in the order of the queue: who awaits its methods one by one is never in a group twice, and of
        # different callers no order is promised.
        by_method: dict[BatchMethod[Any, Any], list[_SqlWork]] = defaultdict(list)
        again: list[tuple[_SqlWork, _SqlWork]] = []
        for work in part:
            first = work if work.request is None else asked[work.request.key]
            if first is not work:
                again.append((work, first))  # sent again while the first is still here
            elif work.request is None or not _answered(work, work.request, known.get(work.request.key)):
                by_method[work.method].append(work)
        for method, works in by_method.items():
            for work, result in zip(works, method(transaction, list(map(_ARGUMENT, works))), strict=True):
                work.result = result
        rows: list[Row] = []
        for key, work in asked.items():
            if key not in known and _changed(work):
                rows.append(_request_row(work, key, now_ns))
        if self._exclusive and self._database.remote:
            rows.append((self._transaction_key, b"", None, now_ns))
        if rows:
            insert_new(connection, requests, rows)
        for work, first in again:
            work.result, work.error = first.result, first.error
        if self._exclusive and time.monotonic() > self._prune_at:
            connection.execute(delete(requests).where(requests.c.created_ns < now_ns - int(REQUEST_KEPT_S * 1e9)))
            self._prune_at = time.monotonic() + PRUNE_EVERY_S

    def _finish(self, root: RootTransaction, transaction: SqlTransaction, part: list[_SqlWork]) -> None:
        # Set before the commit: an exception out of it does not say whether the server had already written it.
        self._in_doubt = _Doubtful(transaction.news, part)
        try:
            root.commit()
        except Exception as error:
            if not (self._exclusive and self._database.passes(error)):
                self._in_doubt = None  # the database refused it (a full disk, a constraint): it did not take place
            raise
        self._in_doubt = None
        for work in part:
            work.done = True
        if transaction.news:
            self._notifier.notify(transaction.news)


_ARGUMENT = operator.attrgetter("argument")
_REQUESTS = select(requests.c.key, requests.c.digest, requests.c.outcome).where(
    requests.c.key.in_(bindparam("ids", expanding=True))
)


def _read_requests(connection: Connection, keys: list[str]) -> dict[str, Row]:
    return {row.key: row for row in execute(connection, _REQUESTS, {"ids": keys})}


def _answered(work: _SqlWork, request: Request, known: Row | None) -> bool:
    """True where the request was done before, or is refused, since it was another then."""
    if known is None:
        return False
    try:
        check_same(request, known.digest)
    except AgentLightningError as error:
        work.error = error
        return True
    work.result = msgspec.msgpack.decode(known.outcome, type=work.kind)
    return True


def _changed(work: _SqlWork) -> bool:
    """False where the request did nothing, so that there is nothing to remember."""
    return work.error is None and work.result != []


def _request_row(work: _SqlWork, key: str, now_ns: int) -> tuple[Any, ...]:
    assert work.request is not None
    return key, work.request.digest, msgspec.msgpack.encode(work.result), now_ns


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
