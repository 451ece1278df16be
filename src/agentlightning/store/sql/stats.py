"""An SQL store in numbers: the load of each run, its size, its attempts and workers.

Functions that read and change nothing. base.py says what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Column, ColumnElement, Connection, LargeBinary, Table, Text, cast, func, select

from agentlightning.records import Attempt, RunSize, RunStatistics, WorkerStatus
from agentlightning.store import codec
from agentlightning.store.base import EXPIRING_S, SEEN_S
from agentlightning.store.sql import tables
from agentlightning.store.sql.tables import attempts, calls, credit, files, rollouts, runs, spans, workers


def read_statistics(connection: Connection, now_ns: int, run_id: str | None) -> list[RunStatistics]:
    """Every number comes from an index, so that it costs what the queue is long, whatever else is stored."""
    asked = select(runs.c.id).where(runs.c.state == "running").order_by(runs.c.id)
    if run_id is not None:
        asked = asked.where(runs.c.id == run_id)
    running = connection.execute(asked).scalars().all()
    soon_ns = now_ns + EXPIRING_S * 10**9
    counted = connection.execute(
        select(rollouts.c.run_id, func.count())
        .join_from(attempts, rollouts, attempts.c.rollout_id == rollouts.c.id)
        .where(attempts.c.state == tables.RUNNING, attempts.c.lease_expires_ns <= soon_ns)
        .group_by(rollouts.c.run_id)
    )
    expiring = {row.run_id: row[1] for row in counted}
    return [_statistics(connection, each, now_ns, expiring.get(each, 0)) for each in running]


def read_attempts(connection: Connection, rollout_ids: Sequence[str]) -> list[Attempt]:
    columns = [column for column in attempts.c if column.name != "token"]
    return [
        Attempt(**row._mapping)
        for part in codec.chunks(rollout_ids)
        for row in connection.execute(
            select(*columns).where(attempts.c.rollout_id.in_(part)).order_by(attempts.c.rollout_id, attempts.c.attempt)
        )
    ]


def read_workers(connection: Connection, run_id: str | None = None) -> list[WorkerStatus]:
    query = select(workers).order_by(workers.c.seen_ns.desc(), workers.c.id)
    if run_id is not None:
        query = query.where(workers.c.run_id == run_id)
    return [WorkerStatus(**row._mapping) for row in connection.execute(query)]


def read_size(connection: Connection, run_id: str) -> RunSize:
    """One run; reads its rollouts, calls, spans, credit and files. A run that is gone has nothing."""
    counted = {table: _count_and_bytes(connection, table, run_id) for table in (rollouts, calls, spans, credit)}
    kept = select(func.coalesce(func.sum(func.length(files.c.data)), 0)).where(files.c.run_id == run_id)
    return RunSize(
        run_id=run_id,
        rollouts=counted[rollouts][0],
        calls=counted[calls][0],
        spans=counted[spans][0],
        bytes=sum(size for _, size in counted.values()) + connection.execute(kept).scalar_one(),
    )


def _statistics(connection: Connection, run_id: str, now_ns: int, expiring: int) -> RunStatistics:
    def in_state(state: str) -> tuple[int, str | None]:
        query = select(func.count(), func.min(rollouts.c.id))
        count, first = connection.execute(query.where(rollouts.c.run_id == run_id, rollouts.c.state == state)).one()
        return count, first

    queued, first = in_state("queued")
    created_ns = connection.execute(select(rollouts.c.created_ns).where(rollouts.c.id == first)).scalar()
    seen = select(func.count()).where(workers.c.run_id == run_id, workers.c.seen_ns > now_ns - SEEN_S * 10**9)
    return RunStatistics(
        run_id=run_id,
        queued=queued,
        oldest_queued_s=0.0 if created_ns is None else max(0.0, (now_ns - created_ns) / 1e9),
        running=in_state("running")[0],
        expiring=expiring,
        workers=connection.execute(seen).scalar_one(),
    )


def _count_and_bytes(connection: Connection, table: Table, run_id: str) -> tuple[int, int]:
    sizes = [
        func.coalesce(_bytes(connection, column), 0)
        for column in table.c
        if isinstance(column.type, Text | LargeBinary)
    ]
    numbers = 8 * (len(table.c) - len(sizes))
    total = func.coalesce(func.sum(sum(sizes[1:], sizes[0])), 0)
    query = select(func.count(), total).where(rollouts.c.run_id == run_id)
    if table is not rollouts:  # by their rollouts, since there is no index of calls by run
        query = query.join_from(rollouts, table, table.c.rollout_id == rollouts.c.id)
    count, size = connection.execute(query).one()
    return int(count), int(size) + numbers * int(count)


def _bytes(connection: Connection, column: Column[str] | Column[bytes]) -> ColumnElement[int]:
    """length() of text counts characters in SQLite, which has no octet_length() in versions that are in use."""
    if connection.dialect.name == "sqlite":
        return func.length(cast(column, LargeBinary))
    return func.octet_length(column)
