"""The writer: one thread that owns the writing connection and commits whatever is queued as one group.

Driven by the SQL store, whose verbs submit work and await it. A unit of work is (verb, argument), where the verb is a
function of a transaction and a LIST of arguments: the arguments queued for one verb at a time become one call, so that a
hundred concurrent appends are one executemany. One that fails fails alone. Nothing is answered before the commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DBAPIError

from agentlightning.errors import StoreError
from agentlightning.store.bell import Bell, Topic

A = TypeVar("A")
R = TypeVar("R")

GROUP = 1000
"""Most units of work in one transaction."""
GATHER_S = 0.003
"""While work of several keeps coming, a transaction waits this long for more to join it: a commit costs as much as ten
appends. Work that comes alone does not wait, however soon after the last."""


@dataclass(slots=True)
class Transaction:
    """What a verb works with: the connection, the time, and whom to wake once it is committed."""

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
            columns = [column.name for column in table.columns if column.name != "seq"]
            statement = insert(table).on_conflict_do_nothing(index_elements=["id"] if "id" in columns else None)
            text = str(statement.compile(dialect=self.connection.dialect, column_keys=columns))
            self._inserts[table] = text
        self.connection.exec_driver_sql(text, rows)

    def tell(self, about: str, run_id: str, value: int = 0) -> None:
        """Wake those who wait for this topic, after the commit."""
        self.news[about, run_id] = value


Verb = Callable[[Transaction, Sequence[A]], list[R]]


@dataclass(slots=True, eq=False)
class _Work:
    verb: Verb[Any, Any]
    argument: Any
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    result: Any = None
    error: BaseException | None = None


class Writer:
    """The thread. `submit` from any event loop; `stop` once."""

    def __init__(self, engine: Engine, now_ns: Callable[[], int], bell: Bell) -> None:
        self._engine = engine
        self._now_ns = now_ns
        self._bell = bell
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._inserts: dict[Table, str] = {}
        self._stopped = False
        self._committed = 0.0
        """time.monotonic() of the last commit."""
        self._crowded = False
        """The last commit was of more than one."""
        self._thread = threading.Thread(target=self._serve, name="store-writer", daemon=True)
        self._thread.start()

    async def submit(self, verb: Verb[A, R], argument: A) -> R:
        """Run the verb on this argument in some transaction; returns after its commit."""
        if self._stopped:
            raise StoreError("the store is closed; open it first")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._queue.put(_Work(verb, argument, future, loop))
        return await future

    def stop(self) -> None:
        """Finish what was submitted, then end the thread. Blocks."""
        if not self._stopped:
            self._stopped = True
            self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        connection: Connection | None = None
        open_for_work = True
        while open_for_work:
            group, open_for_work = self._next_group()
            group = [work for work in group if not work.future.cancelled()]
            if not group:
                continue
            try:
                if connection is None or connection.closed:
                    connection = self._engine.connect()
                self._execute(connection, group)
            except Exception as error:  # whatever it was, the callers get it, and the thread lives on
                for work in group:
                    work.error = error
                if connection is not None:
                    with contextlib.suppress(DBAPIError):
                        connection.close()
            self._committed, self._crowded = time.monotonic(), len(group) > 1
            _answer(group)
        if connection is not None:
            connection.close()
        self._engine.dispose()  # here, since a connection to memory may be closed by the thread that made it only

    def _next_group(self) -> tuple[list[_Work], bool]:
        """Everything that is queued, up to a bound; waits for the first. False once stopped."""
        group: list[_Work] = []
        work = self._queue.get()
        if work is not None and self._crowded and time.monotonic() - self._committed < GATHER_S:
            time.sleep(GATHER_S)
        while work is not None:
            group.append(work)
            if len(group) == GROUP:
                return group, True
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                return group, True
        return group, False

    def _execute(self, connection: Connection, group: list[_Work]) -> None:
        by_verb: dict[Verb[Any, Any], list[_Work]] = defaultdict(list)
        for work in group:
            by_verb[work.verb].append(work)
        transaction = Transaction(connection, self._now_ns(), _inserts=self._inserts)
        with connection.begin():
            for works in by_verb.values():
                _run(transaction, works)
        if transaction.news:
            self._bell.ring(transaction.news)


def _run(transaction: Transaction, works: list[_Work]) -> None:
    """One call of the verb for all works; where that fails, one call for each, so that only the culprits fail."""
    savepoint = transaction.connection.begin_nested()
    try:
        results = works[0].verb(transaction, [work.argument for work in works])
    except Exception as error:  # handed to the caller, who awaits it
        if not _alive(transaction.connection):
            raise
        savepoint.rollback()
        if len(works) == 1:
            works[0].error = error
            return
        for work in works:
            _run(transaction, [work])
    else:
        savepoint.commit()
        for work, result in zip(works, results, strict=True):
            work.result = result


def _alive(connection: Connection) -> bool:
    """False where SQLite gave up the whole transaction, as it does on a full disk or an I/O error."""
    return bool(getattr(connection.connection.driver_connection, "in_transaction", True))


def _answer(group: list[_Work]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Work]] = defaultdict(list)
    for work in group:
        by_loop[work.loop].append(work)
    for loop, works in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
            loop.call_soon_threadsafe(_settle, works)


def _settle(works: list[_Work]) -> None:
    for work in works:
        if work.future.done():
            continue
        if work.error is not None:
            work.future.set_exception(work.error)
        else:
            work.future.set_result(work.result)
