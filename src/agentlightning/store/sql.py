"""SqlLightningStore: the verbs on an SQL database (SQLite in memory or in a file).

Driven by whoever owns the database: a server, or a test. Verbs that write are submitted to the writer thread, which commits
them in groups; verbs that read a file use threads of their own, so that a long list never delays a call. Waiting is pushed:
the writer rings a bell after a commit. What the verbs do in SQL is in lifecycle.py, record.py and history.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import uuid_utils
from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError

from agentlightning.errors import ConflictError, InputError, StoreError
from agentlightning.store import history, keys, lifecycle, record, rows, tables
from agentlightning.store.base import LEASE_S, LightningStore, RolloutQuery, reward_number
from agentlightning.store.bell import Bell
from agentlightning.store.database import READERS, Database, prepare_schema
from agentlightning.store.writer import Transaction, Verb, Writer
from agentlightning.types import (
    JSON,
    Attempt,
    Call,
    Checkpoint,
    Claim,
    Consumed,
    Finish,
    Lease,
    Metric,
    Mode,
    NewRollout,
    Resource,
    Reward,
    Rollout,
    RolloutState,
    Run,
    RunState,
    Span,
    Step,
    Worker,
)

A = TypeVar("A")
R = TypeVar("R")


class SqlLightningStore(LightningStore):
    """A store at ``memory://`` or ``sqlite:///path``; `now_ns` is its clock."""

    def __init__(self, url: str, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._database = Database.at(url)
        self._now_ns = now_ns
        self._bell = Bell()
        self._writer: Writer | None = None
        self._reader: Engine | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._secret = b""

    async def open(self) -> None:
        if self._writer is not None:
            return
        self._writer = Writer(self._database.writer(), self._now_ns, self._bell)
        try:
            self._secret = await self._write(_prepare, self._database.name)
        except BaseException:
            await self.close()
            raise
        if not self._database.in_memory:
            self._reader = self._database.reader()
            self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        await asyncio.to_thread(writer.stop)
        if self._threads is not None:
            await asyncio.to_thread(self._threads.shutdown)
        if self._reader is not None:
            self._reader.dispose()
        self._reader = self._threads = None

    async def signing_secret(self) -> bytes:
        self._opened()
        return self._secret

    # --- runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, name: str, config: JSON, run_id: str | None = None) -> Run:
        if run_id is not None:
            history.check_run_id(run_id)
        return await self._write(history.create_run, history.NewRun(name, rows.dump(config, "config"), run_id))

    async def update_run(self, run_id: str, state: RunState | None = None, summary: JSON | None = None) -> Run:
        return await self._write(history.update_run, history.RunChange(run_id, state, summary))

    async def runs(self, ids: Sequence[str] | None = None, limit: int | None = None) -> list[Run]:
        return await self._read(lambda connection: history.read_runs(connection, ids, limit))

    # --- rollouts and attempts ------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        now_ns = self._now_ns()
        new = [rows.rollout_row(rollout, str(uuid_utils.uuid7()), now_ns) for rollout in rollouts]
        return await self._write(lifecycle.enqueue, new)

    async def claim(
        self,
        worker: Worker,
        limit: int = 1,
        lease_s: float = LEASE_S,
        wait_s: float = 0.0,
    ) -> list[Claim]:
        if limit < 1:
            raise InputError(f"limit: expected at least 1, got {limit}")
        request = lifecycle.ClaimRequest(worker, limit, lease_s)
        deadline = time.monotonic() + wait_s
        with self._bell.listening((lifecycle.QUEUED, worker.run_id)) as listener:
            taken = await self._write(lifecycle.claim, request)
            while not taken and (left_s := deadline - time.monotonic()) > 0:
                await listener.wait(left_s)
                taken = await self._write(lifecycle.claim, request)
        return [
            Claim(rollout=rollout, lease=lease, key=keys.mint(self._secret, rollout.id, rollout.attempt))
            for rollout, lease in taken
        ]

    async def heartbeat(self, worker: Worker, leases: Sequence[Lease], lease_s: float = LEASE_S) -> list[bool]:
        return await self._write(lifecycle.heartbeat, lifecycle.Beat(worker, leases, lease_s))

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        return await self._write(lifecycle.finish, finishes)

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        return await self._write(lifecycle.cancel, rollout_ids)

    async def expire_leases(self) -> int:
        return await self._write(lifecycle.expire, None)

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        return await self._read(lambda connection: lifecycle.read_rollouts(connection, query))

    async def count(self, run_id: str) -> dict[tuple[Mode, RolloutState], int]:
        return await self._read(lambda connection: lifecycle.read_counts(connection, run_id))

    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        return await self._read(lambda connection: lifecycle.read_attempts(connection, rollout_ids))

    async def wait(self, run_id: str, after: int = 0, at_least: int = 1, timeout_s: float = 30.0) -> list[Rollout]:
        deadline = time.monotonic() + timeout_s
        with self._bell.listening((lifecycle.FINISHED, run_id), goal=after + at_least) as listener:
            last = await self._read(lambda connection: lifecycle.read_last_finished(connection, run_id))
            if last < after + at_least and (left_s := deadline - time.monotonic()) > 0:
                await listener.wait(left_s)
        return await self._read(lambda connection: lifecycle.read_finished(connection, run_id, after))

    async def workers(self, run_id: str | None = None) -> list[Worker]:
        return await self._read(lambda connection: lifecycle.read_workers(connection, run_id))

    # --- the record -----------------------------------------------------------------------------------------------

    async def append_calls(self, calls: Sequence[Call]) -> None:
        await self._append(record.append_calls, tables.calls, [rows.call_row(call) for call in calls])

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await self._append(record.append_spans, tables.spans, [rows.span_row(span) for span in spans])

    async def calls(self, rollout_ids: Sequence[str], attempt: int | None = None) -> list[Call]:
        return await self._read(lambda connection: record.read_calls(connection, rollout_ids, attempt))

    async def spans(self, rollout_ids: Sequence[str]) -> list[Span]:
        return await self._read(lambda connection: record.read_spans(connection, rollout_ids))

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        now_ns = self._now_ns()
        new = [rows.reward_row(reward, reward_number(reward.value, reward.name), now_ns) for reward in rewards]
        await self._append(record.record_rewards, tables.rewards, new)

    async def rewards(self, rollout_ids: Sequence[str]) -> list[Reward]:
        return await self._read(lambda connection: record.read_rewards(connection, rollout_ids))

    async def put_resources(self, resources: Sequence[Resource]) -> list[Resource]:
        return await self._write(record.put_resources, resources)

    async def resources(self, run_id: str, name: str | None = None, latest: bool = True) -> list[Resource]:
        return await self._read(lambda connection: record.read_resources(connection, run_id, name, latest))

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        now_ns = self._now_ns()
        await self._append(record.log_metrics, tables.metrics, [rows.metric_row(metric, now_ns) for metric in metrics])

    async def metrics(self, run_id: str, name: str | None = None) -> list[Metric]:
        return await self._read(lambda connection: record.read_metrics(connection, run_id, name))

    # --- steps and checkpoints ------------------------------------------------------------------------------------

    async def open_step(self, run_id: str, step: int, consumed: Sequence[Consumed]) -> Step:
        return await self._write(history.open_step, history.Opening(run_id, step, consumed))

    async def close_step(self, run_id: str, step: int, version: int) -> Step:
        return await self._write(history.close_step, history.Closing(run_id, step, version))

    async def steps(self, run_id: str) -> list[Step]:
        return await self._read(lambda connection: history.read_steps(connection, run_id))

    async def reopen_steps(self, run_id: str, after: int) -> list[Step]:
        return await self._write(history.reopen_steps, history.GoingBack(run_id, after))

    async def release_steps(self, run_id: str, after: int) -> int:
        return await self._write(history.release_steps, history.GoingBack(run_id, after))

    async def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        await self._write(history.put_checkpoint, checkpoint)

    async def checkpoints(self, run_id: str) -> list[Checkpoint]:
        return await self._read(lambda connection: history.read_checkpoints(connection, run_id))

    # --- how ------------------------------------------------------------------------------------------------------

    def _opened(self) -> Writer:
        if self._writer is None:
            raise StoreError(f"{self._database.name} is not open: use `async with store`, or await store.open()")
        return self._writer

    async def _write(self, verb: Verb[A, R], argument: A) -> R:
        writer = self._opened()
        with self._explaining():
            return await writer.submit(verb, argument)

    async def _append(self, verb: Verb[record.Rows, None], table: Table, new: record.Rows) -> None:
        if not new:
            return
        writer = self._opened()
        try:
            with self._explaining():
                await writer.submit(verb, new)
        except ConflictError as error:
            if "FOREIGN KEY" not in str(error).upper():
                raise
            raise await self._read(lambda connection: record.missing(connection, table, new)) from None

    async def _read(self, query: Callable[[Connection], R]) -> R:
        self._opened()
        if self._threads is None:  # only the writer has the memory
            return await self._write(_query, query)
        with self._explaining():
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._query_file, query)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise self._database.explain(error) from error
        except OverflowError as error:
            raise InputError(f"expected integers of at most 64 bits: {error}") from None

    def _query_file(self, query: Callable[[Connection], R]) -> R:
        assert self._reader is not None
        with self._reader.connect() as connection:
            return query(connection)


class InMemoryLightningStore(SqlLightningStore):
    """A store that ends with its process; everything else is as in a file."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        super().__init__("memory://", now_ns)


def _prepare(transaction: Transaction, names: Sequence[str]) -> list[bytes]:
    return [prepare_schema(transaction.connection, name) for name in names]


def _query(transaction: Transaction, queries: Sequence[Callable[[Connection], R]]) -> list[R]:
    return [query(transaction.connection) for query in queries]
