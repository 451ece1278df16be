"""SqlLightningStore: the methods on an SQL database (SQLite in memory or in a file, PostgreSQL).

Methods that write are submitted to the writer thread, which commits them in groups; methods that read use threads of their
own: two for lookups by key, as for every call of an agent, and two for lists, so that a long one delays neither calls nor
leases. The writer notifies those who wait (waiting.py) after a commit, and a listener does for commits of other processes.
What the methods do in SQL is in lifecycle.py, record.py, history.py and summaries.py; what differs between databases, in
database.py.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

import uuid_utils
from sqlalchemy import Connection, Table
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from agentlightning import records
from agentlightning.config.run import without_password
from agentlightning.errors import ConfigError, ConflictError, InputError, StoreError
from agentlightning.records import Call, Checkpoint, Finish, Lease, Metric, NewRollout, Reward, Rollout, Span
from agentlightning.runtime.clock import elapsed_s
from agentlightning.store import codec
from agentlightning.store.base import LEASE_S
from agentlightning.store.models import ModelAlias, ModelVersion
from agentlightning.store.request import bound_token, current_request
from agentlightning.store.rules import reward_number
from agentlightning.store.sql import history, lifecycle, record, tables
from agentlightning.store.sql.database import Database
from agentlightning.store.sql.sqlite import SqliteDatabase
from agentlightning.store.sql.summaries import read_summaries
from agentlightning.store.sql.writer import PAUSES_S, BatchMethod, SqlTransaction, SqlWriter
from agentlightning.store.tokens import Token
from agentlightning.store.waiting import WaitingStore

MAX_LOOKUP_IDS = 1000  # rollouts that are looked up by key: a heartbeat's, whose run decides who may renew them

A = TypeVar("A")
R = TypeVar("R")
P = ParamSpec("P")
_TAKEN = list[tuple[Rollout, Lease]]
Method = Callable[Concatenate["SqlLightningStore", P], Coroutine[Any, Any, R]]
Query = tuple[Callable[..., R], Sequence[Any], Mapping[str, Any]]
"""A function of a connection, and its further arguments."""
UNEXPLAINED = (DBAPIError, OverflowError, UnicodeEncodeError)
"""Errors of drivers, in whose place callers get a sentence."""


def _writes(write: Callable[Concatenate[SqlTransaction, P], R], kind: Any = None) -> Method[P, R]:
    """The method that has the writer do this. `kind`: the type of its result, if a request that comes again gets that."""

    @functools.wraps(write)
    async def method(store: SqlLightningStore, /, *args: P.args, **named: P.kwargs) -> R:
        return await store._do(lambda transaction: write(transaction, *args, **named), kind)

    return method


def _always(*_: object, **__: object) -> bool:
    return True


def _reads(read: Callable[Concatenate[Connection, P], R], by_key: Callable[P, bool] | None = None) -> Method[P, R]:
    """The method that reads this. `by_key`: true of its arguments where it reads little, by key, as authorization and long
    polls do: no scan delays that."""

    @functools.wraps(read)
    async def method(store: SqlLightningStore, /, *args: P.args, **named: P.kwargs) -> R:
        looks_up = by_key is not None and by_key(*args, **named)
        return await store._read((read, args, named), looks_up)

    return method


class _ReadPool:
    """Threads that read, each over a connection of its own."""

    def __init__(self, database: Database, name: str) -> None:
        self._engine = database.reader()
        self.threads = ThreadPoolExecutor(database.readers, thread_name_prefix=f"store-{name}")

    def read(self, query: Query[R]) -> R:
        """The result of the query, in one of the threads."""
        read, args, named = query
        with self._engine.connect() as connection:
            return read(connection, *args, **named)

    def stop(self) -> None:
        """Finish what was asked. Blocks."""
        self.threads.shutdown()
        self._engine.dispose()


class SqlLightningStore(WaitingStore):
    """A store at ``memory://``, ``sqlite:///path`` or ``postgresql://…``; `now_ns` replaces its clock, in tests.

    Without it, time is that of this machine, which all users of a file share, or that of the PostgreSQL server.
    """

    def __init__(self, url: str, now_ns: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._database = database_at(url)
        self._now_ns = now_ns or self._database.now_ns
        self._clock = now_ns
        self._writer: SqlWriter | None = None
        self._appender: SqlWriter | None = None
        self._lookups: _ReadPool | None = None
        self._scans: _ReadPool | None = None
        self._end_listening: Callable[[], None] | None = None
        self._heard: Callable[[float, int], None] | None = None

    @property
    def shared(self) -> bool:
        return self._database.shared

    def watch_commits(self, heard: Callable[[float, int], None]) -> None:
        self._heard = heard
        for writer in (self._writer, self._appender):
            if writer is not None:
                writer.heard = heard

    async def open(self) -> None:
        if self._writer is not None:
            return
        database, name = self._database, uuid4().hex
        self._writer = SqlWriter(database, name, self._notifier, now_ns=self._clock, opening=self._prepare)
        try:
            await self._do(lambda _: None)  # the writer prepares the schema before
            self._appender = self._writer
            if database.appends_apart:
                appends = f"{name} appends"
                self._appender = SqlWriter(database, appends, self._notifier, now_ns=self._clock, exclusive=False)
            if self._heard is not None:
                self.watch_commits(self._heard)
            if database.readers:
                self._lookups, self._scans = _ReadPool(database, "lookup"), _ReadPool(database, "scan")
            self._end_listening = await asyncio.to_thread(database.listen, self._notifier, name, self.background)
        except BaseException as error:
            await self.close()
            if isinstance(error, UNEXPLAINED):
                raise self._explained(error) from error
            raise

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        appender, self._appender = self._appender, None
        ends = [appender.stop if appender is not None else None, writer.stop, self._end_listening]
        ends += [pool.stop for pool in (self._lookups, self._scans) if pool is not None]
        for end in ends:
            if end is not None:
                await asyncio.to_thread(end)
        self._lookups = self._scans = self._end_listening = None

    async def signing_secret(self) -> bytes:
        self._opened()
        return self._secret

    # --- runs, rollouts and attempts ------------------------------------------------------------------------------

    async def create_run(self, name: str, config: records.JSON, run_id: str | None = None) -> records.Run:
        binds = bound_token()  # here: the writer's thread knows no caller
        return await self._do(lambda t: history.create_run(t, name, config, run_id, binds), records.Run)

    update_run = _writes(history.update_run)
    runs = _reads(history.read_runs, lambda ids=None, limit=None: limit == 1 or (ids is not None and len(ids) == 1))

    async def enqueue(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        now_ns = self._now_ns()
        new = [codec.new_rollout(rollout, str(uuid_utils.uuid7()), now_ns) for rollout in rollouts]
        return await self._write(lifecycle.enqueue, [codec.ROLLOUTS.columns(rollout) for rollout in new])

    async def _take(self, worker: records.WorkerStatus, limit: int, lease_s: float) -> list[tuple[Rollout, Lease]]:
        return await self._write(lifecycle.claim, lifecycle.ClaimRequest(worker, limit, lease_s), _TAKEN)

    async def heartbeat(
        self, worker: records.WorkerStatus, leases: Sequence[Lease], lease_s: float = LEASE_S
    ) -> list[bool]:
        return await self._write(lifecycle.heartbeat, lifecycle.Beat(worker, leases, lease_s))

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        return await self._write(lifecycle.finish, finishes, list[bool])

    async def _open_session(self, session: NewRollout, rollout_id: str, token: str, lease_s: float) -> Rollout:
        new = codec.new_rollout(replace(session, replica=0), rollout_id, self._now_ns())
        return await self._write(lifecycle.open_sessions, lifecycle.SessionRequest(new, token, lease_s))

    cancel = _writes(lifecycle.cancel, int)

    async def expire_leases(self, within_s: float | None = None) -> int:
        return await self._write(lifecycle.expire, math.inf if within_s is None else elapsed_s() + within_s, int)

    rollouts = _reads(lifecycle.read_rollouts, lambda query: query.ids is not None and len(query.ids) <= MAX_LOOKUP_IDS)
    count = _reads(lifecycle.read_counts)
    _summaries = _reads(read_summaries)
    attempts = _reads(history.read_attempts)
    _last_finished = _reads(lifecycle.read_last_finished, _always)
    _finished = _reads(lifecycle.read_finished)
    workers = _reads(history.read_workers)

    # --- the record -----------------------------------------------------------------------------------------------

    async def append_calls(self, calls: Sequence[Call]) -> None:
        await self._append(self._appender, record.append_calls, tables.calls, [codec.call_row(call) for call in calls])

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await self._append(self._appender, record.append_spans, tables.spans, [codec.SPANS.row(span) for span in spans])

    put_files = _writes(record.put_files)
    files = _reads(record.read_files, _always)
    mark_delivered = _writes(record.mark_delivered)
    calls = _reads(record.read_calls, lambda rollout_ids, attempt=None: len(rollout_ids) == 1)
    spans = _reads(record.read_spans)

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        await self._append(self._appender, record.record_rewards, tables.rewards, self._settled(rewards))

    async def record_feedback(self, rewards: Sequence[Reward]) -> None:
        # By the writer, in turn with what ends sessions.
        await self._append(self._writer, lifecycle.record_feedback, tables.rewards, self._settled(rewards))

    rewards = _reads(record.read_rewards)
    put_resources = _writes(record.put_resources, list[records.Resource])
    resources = _reads(
        record.read_resources, lambda run_id, name=None, latest=True, version=None: latest or version is not None
    )

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        now_ns = self._now_ns()
        new = [codec.METRICS.row(replace(metric, created_ns=metric.created_ns or now_ns))[:-1] for metric in metrics]
        await self._append(self._writer, record.log_metrics, tables.metrics, new, type(None))  # in the order of commits

    metrics = _reads(record.read_metrics)
    _series = _reads(record.read_series)
    record_credit = _writes(record.record_credit)
    credit = _reads(record.read_credit)
    drop_credit = _writes(record.drop_credit)

    # --- waiting, statistics, the end of data ---------------------------------------------------------------------

    _later_resources = _reads(record.read_later_resources, _always)
    _later_metrics = _reads(record.read_later_metrics)

    async def statistics(self, run_id: str | None = None) -> list[records.RunStatistics]:
        now_ns = self._now_ns()
        return await self._read((history.read_statistics, (now_ns, run_id), {}))

    drop_records = _writes(history.drop_records, int)

    async def delete_runs(self, run_ids: Sequence[str]) -> int:
        deleted = 0
        for run_id in dict.fromkeys(run_ids):
            await self.retire_models(run_id)
            portion, more = 0, True
            while more:
                delete = functools.partial(history.delete_portion, run_id=run_id, first=portion == 0)
                known, more = await self._do(delete, tuple[bool, bool], f"{run_id} {portion}")
                deleted += known and portion == 0
                portion += 1
        return deleted

    # --- access, models, steps and checkpoints --------------------------------------------------------------------

    _add_token = _writes(history.add_token, Token)
    tokens = _reads(history.read_tokens)
    find_token = _reads(history.find_token, _always)
    _revoke_token = _writes(history.revoke_token)

    async def revoke_token(self, token_id: str) -> Token:
        revoked = await self._revoke_token(token_id)
        # Once this returns the token opens nothing: a power cut must not give it back.
        await asyncio.to_thread(self._database.sync)
        return revoked

    models = _reads(history.read_models, _always)
    _put_alias = _writes(history.put_alias, ModelAlias)
    aliases = _reads(history.read_aliases, _always)

    async def _put_model(self, version: ModelVersion) -> ModelVersion:
        put = functools.partial(history.put_model, version=version)
        stored = await self._do(put, ModelVersion, f"{version.reference} {version.revision}")
        if stored.deleted:
            # Once this returns its files are removed: a power cut must not leave a store that takes them for whole.
            await asyncio.to_thread(self._database.sync)
        return stored

    open_step = _writes(history.open_step)
    close_step = _writes(history.close_step)
    steps = _reads(history.read_steps)
    reopen_steps = _writes(history.reopen_steps)
    checkpoints = _reads(history.read_checkpoints)

    async def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        await self._do(lambda transaction: history.put_checkpoint(transaction, checkpoint))
        # Once this returns older checkpoints are deleted: a power cut must not leave a store that knows only those.
        await asyncio.to_thread(self._database.sync)

    # --- how ------------------------------------------------------------------------------------------------------

    def _opened(self) -> SqlWriter:
        if self._writer is None:
            raise StoreError(f"{self._database.name} is not open: use `async with store`, or await store.open()")
        return self._writer

    async def _do(self, work: Callable[[SqlTransaction], R], kind: Any = None, part: str = "") -> R:
        return await self._write(_one_by_one, work, kind, part)

    async def _write(self, method: BatchMethod[A, R], argument: A, kind: Any = None, part: str = "") -> R:
        """`kind`: the type of the result, if a request that comes again gets that. `part`: names one of several
        transactions of a request."""
        writer, request = self._opened(), None if kind is None else current_request()
        try:
            return await writer.submit(method, argument, None if request is None else request.part(part), kind)
        except UNEXPLAINED as error:
            raise self._explained(error) from error

    async def _append(
        self,
        writer: SqlWriter | None,
        method: BatchMethod[record.Rows, None],
        table: Table,
        new: record.Rows,
        kind: Any = None,
    ) -> None:
        self._opened()
        if not new or writer is None:
            return
        try:
            await writer.submit(method, new, None if kind is None else current_request(), kind)
        except UNEXPLAINED as error:
            explained = self._explained(error)
            if not isinstance(explained, ConflictError) or "FOREIGN KEY" not in str(explained).upper():
                raise explained from error
            raise await self._read((record.missing, (table, new), {}), True) from None

    async def _read(self, query: Query[R], looks_up: bool = False) -> R:
        pool = self._lookups if looks_up else self._scans
        if pool is None:  # only the writer has the memory
            return await self._write(_read_each, query)
        deadline = time.monotonic() + self._database.patience_s
        while True:
            self._opened()
            try:
                return await asyncio.get_running_loop().run_in_executor(pool.threads, pool.read, query)
            except UNEXPLAINED as error:
                if not self._database.passes(error) or time.monotonic() > deadline:
                    raise self._explained(error) from error
            await asyncio.sleep(PAUSES_S[-1])

    def _settled(self, rewards: Sequence[Reward]) -> record.Rows:
        now_ns = self._now_ns()
        return [
            codec.REWARDS.row(
                replace(one, value=reward_number(one.value, one.name), created_ns=one.created_ns or now_ns)
            )
            for one in rewards
        ]

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, DBAPIError):
            return self._database.explain(error)
        wanted = "integers of at most 64 bits" if isinstance(error, OverflowError) else "text of whole characters"
        return InputError(f"expected {wanted}: {error}")

    def _prepare(self, connection: Connection) -> None:
        """Run by the writer on its first connection."""
        self._secret = tables.prepare_schema(connection, self._database)


class InMemoryLightningStore(SqlLightningStore):
    """A store that ends with its process; everything else is as in a file."""

    def __init__(self, now_ns: Callable[[], int] | None = None) -> None:
        super().__init__("memory://", now_ns)


def _one_by_one(transaction: SqlTransaction, works: Sequence[Callable[[SqlTransaction], R]]) -> list[R]:
    return [work(transaction) for work in works]


def _read_each(transaction: SqlTransaction, queries: Sequence[Query[R]]) -> list[R]:
    found = []
    for read, args, named in queries:
        found.append(read(transaction.connection, *args, **named))
    return found


def database_at(url: str) -> Database:
    """The database at a URL; ConfigError where it is none, MissingExtraError where its driver is not installed."""
    if url == "memory://":
        return SqliteDatabase(make_url("sqlite://"))
    scheme = url.partition("://")[0]
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        parsed = None
    if parsed is not None and scheme == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return SqliteDatabase(parsed)
    if parsed is not None and scheme in ("postgresql", "postgres"):
        from agentlightning.store.sql.postgres import PostgresDatabase

        return PostgresDatabase(parsed)
    raise ConfigError(
        "store: expected memory://, sqlite:///path or postgresql://user:password@host/database, "
        f"got {without_password(url)!r}"
    )
