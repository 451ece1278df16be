"""The record in SQL: calls, spans, rewards and credit of attempts, files; resources and metrics of runs.

Methods of the writer take a transaction and a list of arguments, one per caller (rows of hot tables come ready made, see
codec.py, so that a group of callers is one executemany); functions that read take a connection. base.py says what they mean.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.records import Call, CallCredit, Metric, Resource, Reward, Span
from agentlightning.store import codec
from agentlightning.store.rules import refusal
from agentlightning.store.sql import tables
from agentlightning.store.sql.database import execute, insert_new, upsert
from agentlightning.store.sql.tables import (
    attempts,
    calls,
    credit,
    file_uses,
    metrics,
    resource_versions,
    resources,
    rewards,
    rollouts,
    spans,
)
from agentlightning.store.sql.writer import SqlTransaction
from agentlightning.store.summaries import SeriesPoint, bucket_width
from agentlightning.store.waiting import METRICS, RESOURCES

_RUNS = sa.select(tables.runs.c.id).where(tables.runs.c.id.in_(sa.bindparam("ids", expanding=True)))
_WHOSE_CALLS = sa.select(calls.c.id, calls.c.rollout_id).where(calls.c.id.in_(sa.bindparam("ids", expanding=True)))

Rows = list[tuple[Any, ...]]


def rows_by_ids(
    connection: sa.Connection, query: sa.Select[Any], column: sa.Column[str], ids: Iterable[str]
) -> Iterator[Any]:
    """Rows of the query whose column is one of these, in its order if that begins with the column."""
    for part in codec.chunks(ids):
        yield from connection.execute(query.where(column.in_(part)))


def only(query: sa.Select[Any], column: sa.Column[Any], value: Any) -> sa.Select[Any]:
    """The rows whose column has the value; all where it is None."""
    return query if value is None else query.where(column == value)


def require_runs(connection: sa.Connection, run_ids: Collection[str]) -> None:
    """NotFoundError that names the runs which do not exist."""
    found = {row.id for row in execute(connection, _RUNS, {"ids": list(run_ids)})}
    if missing := sorted(set(run_ids) - found):
        raise refusal("no_run", ", ".join(missing))


def whose_calls(connection: sa.Connection, call_ids: Collection[str]) -> set[tuple[str, str]]:
    """Those of these calls that are recorded, each with its rollout."""
    found = execute(connection, _WHOSE_CALLS, {"ids": sorted(call_ids)}) if call_ids else []
    return {(row.id, row.rollout_id) for row in found}


# --- calls, spans, rewards ----------------------------------------------------------------------------------------------


def append_calls(transaction: SqlTransaction, batches: Sequence[Rows]) -> list[None]:
    _append(transaction, calls, batches)
    return _refuse_foreign_calls(transaction, calls, "parent_id", batches)


def append_spans(transaction: SqlTransaction, batches: Sequence[Rows]) -> list[None]:
    return _append(transaction, spans, batches)


def record_rewards(transaction: SqlTransaction, batches: Sequence[Rows]) -> list[None]:
    _append(transaction, rewards, batches)
    return _refuse_foreign_calls(transaction, rewards, "call_id", batches)


def mark_delivered(
    transaction: SqlTransaction, rollout_id: str, attempt: int, call_ids: Sequence[str], delivered: bool
) -> None:
    mine = calls.c.rollout_id == rollout_id, calls.c.attempt == attempt, calls.c.id.in_(call_ids)
    transaction.connection.execute(sa.update(calls).where(*mine).values(delivered=delivered))


def missing(connection: sa.Connection, table: sa.Table, new: Rows) -> StoreError:
    """Names the thing that rows refer to and that does not exist: asked when a foreign key refused them."""
    place = _places(table)
    require_runs(connection, {row[place["run_id"]] for row in new})
    if "attempt" not in place:
        return NotFoundError(f"{table.name}: they refer to what is not recorded")
    named = [(row[place["rollout_id"]], row[place["attempt"]]) for row in new]
    query = sa.select(attempts.c.rollout_id, attempts.c.attempt)
    known = {tuple(row) for row in rows_by_ids(connection, query, attempts.c.rollout_id, [one for one, _ in named])}
    lacking = next((one for one in named if one not in known), None)
    return refusal("no_call", table.name) if lacking is None else refusal("no_attempt", table.name, *lacking)


def read_calls(connection: sa.Connection, rollout_ids: Sequence[str], attempt: int | None = None) -> list[Call]:
    query = sa.select(calls).order_by(calls.c.rollout_id, calls.c.finished_ns, calls.c.id)
    if attempt is None:
        latest = sa.and_(rollouts.c.id == calls.c.rollout_id, rollouts.c.attempt == calls.c.attempt)
        query = query.join(rollouts, latest)
    else:
        query = query.where(calls.c.attempt == attempt)
    return [codec.CALLS.of_row(row) for row in rows_by_ids(connection, query, calls.c.rollout_id, rollout_ids)]


def read_spans(connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Span]:
    query = sa.select(spans).order_by(spans.c.rollout_id, spans.c.started_ns, spans.c.id)
    return [codec.SPANS.of_row(row) for row in rows_by_ids(connection, query, spans.c.rollout_id, rollout_ids)]


def read_rewards(connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Reward]:
    query = sa.select(rewards).order_by(rewards.c.rollout_id, rewards.c.created_ns, rewards.c.seq)
    return [codec.REWARDS.of_row(row) for row in rows_by_ids(connection, query, rewards.c.rollout_id, rollout_ids)]


def _append(transaction: SqlTransaction, table: sa.Table, batches: Sequence[Rows]) -> list[None]:
    insert_new(transaction.connection, table, [row for batch in batches for row in batch])
    return [None] * len(batches)


def _refuse_foreign_calls(
    transaction: SqlTransaction, table: sa.Table, column: str, batches: Sequence[Rows]
) -> list[None]:
    """NotFoundError where a row names a call of another rollout: neither could be deleted without the other.

    Asked after the rows are inserted: then each call that they name is there, whatever else had its id before.
    """
    place = _places(table)
    call, rollout = place[column], place["rollout_id"]
    named = {(row[call], row[rollout]) for batch in batches for row in batch if row[call] is not None}
    if named - whose_calls(transaction.connection, {call_id for call_id, _ in named}):
        raise refusal("no_call", table.name)
    return [None] * len(batches)


@functools.cache
def _places(table: sa.Table) -> dict[str, int]:
    """Places of a row's values by the names of its columns."""
    return {column.name: index for index, column in enumerate(c for c in table.columns if c.name != "seq")}


# --- resources ----------------------------------------------------------------------------------------------------------


def put_resources(
    transaction: SqlTransaction, resources: Sequence[Resource], after: Mapping[str, int] | None = None
) -> list[Resource]:
    run_ids = {resource.run_id for resource in resources}
    require_runs(transaction.connection, run_ids)
    for resource in resources if after else ():
        _require_newest(transaction.connection, resource, after or {})
    for run_id in run_ids:
        transaction.tell(RESOURCES, run_id)
    return [_put(transaction, resource) for resource in resources]


def read_resources(
    connection: sa.Connection, run_id: str, name: str | None = None, latest: bool = True, version: int | None = None
) -> list[Resource]:
    query = sa.select(resources).where(resources.c.run_id == run_id)
    query = only(only(query, resources.c.name, name), resources.c.version, version)
    if version is None and latest:
        query = query.join(resource_versions, tables.IS_NEWEST)
    query = query.order_by(resources.c.name, resources.c.version)
    return [codec.RESOURCES.of_row(row) for row in connection.execute(query)]


def read_later_resources(connection: sa.Connection, run_id: str, after: Mapping[str, int]) -> list[Resource]:
    """The newest version of each resource that is later than `after` says; values of others are not read."""
    require_runs(connection, {run_id})
    versions = sa.select(resource_versions.c.name, resource_versions.c.last).where(resource_versions.c.run_id == run_id)
    later = [(name, last) for name, last in connection.execute(versions) if last > after.get(name, 0)]
    if not later:
        return []
    chosen = sa.tuple_(resources.c.name, resources.c.version).in_(later)
    query = sa.select(resources).where(resources.c.run_id == run_id, chosen).order_by(resources.c.name)
    return [codec.RESOURCES.of_row(row) for row in connection.execute(query)]


def _require_newest(connection: sa.Connection, resource: Resource, after: Mapping[str, int]) -> None:
    """Refuses where a resource has another version than `after` says. Nobody puts one meanwhile: writers take turns."""
    if (expected := after.get(resource.name)) is None:
        return
    mine = resource_versions.c.run_id == resource.run_id, resource_versions.c.name == resource.name
    newest = connection.execute(sa.select(resource_versions.c.last).where(*mine)).scalar() or 0
    if newest != expected:
        raise refusal("resource_changed", resource.name, resource.run_id, newest, expected)


def _put(transaction: SqlTransaction, resource: Resource) -> Resource:
    first = upsert(transaction.connection, resource_versions)
    next_version = first.values(run_id=resource.run_id, name=resource.name, last=1).on_conflict_do_update(
        index_elements=["run_id", "name"], set_={"last": resource_versions.c.last + 1}
    )
    counted = transaction.connection.execute(next_version.returning(resource_versions.c.last))
    created_ns = resource.created_ns or transaction.now_ns
    stored = replace(resource, version=counted.scalar_one(), created_ns=created_ns)
    transaction.connection.execute(resources.insert(), codec.RESOURCES.columns(stored))
    return stored


# --- files --------------------------------------------------------------------------------------------------------------


def put_files(transaction: SqlTransaction, run_id: str, rollout_id: str | None, files: Mapping[str, bytes]) -> None:
    connection = transaction.connection
    require_runs(connection, {run_id})
    mine = sa.select(rollouts.c.id).where(rollouts.c.id == rollout_id, rollouts.c.run_id == run_id)
    if rollout_id is not None and connection.execute(mine).first() is None:
        raise refusal("no_file_user", rollout_id, run_id)
    for name, data in sorted(files.items()):
        new = upsert(connection, tables.files).values(run_id=run_id, hash=name, data=data)
        # An update of what is there already keeps whoever drops records from deleting it before this commits.
        connection.execute(new.on_conflict_do_update(index_elements=["run_id", "hash"], set_={"hash": name}))
        if rollout_id is not None:
            use = upsert(connection, file_uses).values(rollout_id=rollout_id, run_id=run_id, hash=name)
            connection.execute(use.on_conflict_do_nothing())


def read_files(connection: sa.Connection, run_id: str, hashes: Sequence[str]) -> dict[str, bytes]:
    query = sa.select(tables.files.c.hash, tables.files.c.data).where(tables.files.c.run_id == run_id)
    return {row.hash: bytes(row.data) for row in rows_by_ids(connection, query, tables.files.c.hash, hashes)}


def drop_files(connection: sa.Connection, rollout_ids: Sequence[str]) -> None:
    """Delete the files that these rollouts used and no other does."""
    mine = file_uses.c.rollout_id.in_(rollout_ids)
    used = connection.execute(sa.select(file_uses.c.run_id, file_uses.c.hash).where(mine).distinct()).all()
    connection.execute(sa.delete(file_uses).where(mine))
    for run_id, name in used:
        this = tables.files.c.run_id == run_id, tables.files.c.hash == name
        other = sa.exists().where(file_uses.c.run_id == run_id, file_uses.c.hash == name)
        connection.execute(sa.delete(tables.files).where(*this, ~other))


# --- credit and metrics -------------------------------------------------------------------------------------------------


def record_credit(transaction: SqlTransaction, credits: Sequence[CallCredit]) -> None:
    connection = transaction.connection
    rows = [dict(zip(codec.CREDIT.names, codec.credit_row(one), strict=True)) for one in credits]
    # Locked until the commit: whoever deletes a rollout's records meanwhile comes before this, or after it.
    query = sa.select(rollouts.c.id, rollouts.c.run_id).with_for_update(read=True)
    ids = [one.rollout_id for one in credits]
    known = {tuple(row) for row in rows_by_ids(connection, query, rollouts.c.id, ids)}
    for one in credits:
        if (one.rollout_id, one.run_id) not in known:
            raise refusal("no_credited_rollout", one.rollout_id, one.run_id)
    if rows:
        new = upsert(connection, credit)
        keys = [column.name for column in credit.primary_key]
        replaced = {name: new.excluded[name] for name in codec.CREDIT.names if name not in keys}
        connection.execute(new.on_conflict_do_update(index_elements=keys, set_=replaced), rows)


def read_credit(
    connection: sa.Connection, rollout_ids: Sequence[str], call_ids: Sequence[str] | None = None
) -> list[CallCredit]:
    of_calls = [sa.true()] if call_ids is None else [credit.c.call_id.in_(part) for part in codec.chunks(call_ids)]
    found = [
        codec.CREDIT.of_row(row)
        for wanted in of_calls
        for row in rows_by_ids(connection, sa.select(credit).where(wanted), credit.c.rollout_id, rollout_ids)
    ]
    return sorted(found, key=lambda each: (each.rollout_id, each.call_id))


def drop_credit(transaction: SqlTransaction, run_id: str, before: int) -> None:
    transaction.connection.execute(sa.delete(credit).where(credit.c.run_id == run_id, credit.c.step < before))


def log_metrics(transaction: SqlTransaction, batches: Sequence[Rows]) -> list[None]:
    """Their `seq` must be given in the order of commits, or those who follow would miss some."""
    for run_id in {row[0] for batch in batches for row in batch}:
        transaction.tell(METRICS, run_id)
    return _append(transaction, metrics, batches)


def read_later_metrics(connection: sa.Connection, run_id: str, after: int, limit: int) -> list[Metric]:
    require_runs(connection, {run_id})
    query = sa.select(metrics).where(metrics.c.run_id == run_id, metrics.c.seq > after)
    return [codec.METRICS.of_row(row) for row in connection.execute(query.order_by(metrics.c.seq).limit(limit))]


def read_metrics(connection: sa.Connection, run_id: str, name: str | None = None) -> list[Metric]:
    query = sa.select(metrics).where(metrics.c.run_id == run_id)
    query = only(query, metrics.c.name, name)
    query = query.order_by(metrics.c.step, metrics.c.name, metrics.c.created_ns, metrics.c.seq)
    return [codec.METRICS.of_row(row) for row in connection.execute(query)]


def read_series(
    connection: sa.Connection, run_id: str, names: Sequence[str] | None, max_points: int, after_step: int | None
) -> dict[str, list[SeriesPoint]]:
    require_runs(connection, {run_id})
    chosen = [metrics.c.run_id == run_id, metrics.c.abandoned == sa.false(), metrics.c.value.is_not(None)]
    if names is not None:
        chosen.append(metrics.c.name.in_(names))
    if after_step is not None:
        chosen.append(metrics.c.step > after_step)
    ends = sa.select(sa.func.min(metrics.c.step), sa.func.max(metrics.c.step)).where(*chosen)
    first, last = connection.execute(ends).one()
    if first is None:
        return {}
    bucket = (metrics.c.step - first) // bucket_width(first, last, max_points)
    value = metrics.c.value
    newest = sa.func.max(metrics.c.seq).label("seq")
    bounds = sa.select(sa.func.min(value).label("low"), sa.func.max(value).label("high"), newest)
    buckets = bounds.where(*chosen).group_by(metrics.c.name, bucket).subquery()
    points = sa.select(metrics, buckets.c.low, buckets.c.high).join(buckets, buckets.c.seq == metrics.c.seq)
    found: defaultdict[str, list[SeriesPoint]] = defaultdict(list)
    for row in connection.execute(points.order_by(metrics.c.name, metrics.c.step)):
        point = SeriesPoint(step=row.step, value=row.value, low=row.low, high=row.high, created_ns=row.created_ns)
        found[row.name].append(point)
    return dict(found)
