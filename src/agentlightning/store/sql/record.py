"""The record of attempts in SQL: calls, spans and rewards; and what belongs to a run: resources and metrics.

Methods of the writer take a transaction and a list of arguments, one a caller (rows of hot tables come ready made, see
codec.py, so that a group of callers is one executemany); functions that read take a connection. base.py says what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Table, and_, select, tuple_, update

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.records import Call, Metric, Resource, Reward, Span
from agentlightning.store import codec
from agentlightning.store.audit import Actor
from agentlightning.store.notifier import METRICS, RESOURCES
from agentlightning.store.sentences import refusal
from agentlightning.store.sql import statements
from agentlightning.store.sql.access import note_resources
from agentlightning.store.sql.lifecycle import require_runs
from agentlightning.store.sql.prepared import execute
from agentlightning.store.sql.tables import (
    attempts,
    calls,
    metrics,
    resource_versions,
    resources,
    rewards,
    rollouts,
    spans,
)
from agentlightning.store.sql.upsert import upsert
from agentlightning.store.sql.writer import Transaction

Rows = list[tuple[Any, ...]]


def append_calls(transaction: Transaction, batches: Sequence[Rows]) -> list[None]:
    _append(transaction, calls, batches)
    return _refuse_foreign_calls(transaction, calls, "parent_id", batches)


def mark_delivered(
    transaction: Transaction, rollout_id: str, attempt: int, call_ids: Sequence[str], delivered: bool
) -> None:
    mine = calls.c.rollout_id == rollout_id, calls.c.attempt == attempt, calls.c.id.in_(call_ids)
    transaction.connection.execute(update(calls).where(*mine).values(delivered=delivered))


def append_spans(transaction: Transaction, batches: Sequence[Rows]) -> list[None]:
    return _append(transaction, spans, batches)


def record_rewards(transaction: Transaction, batches: Sequence[Rows]) -> list[None]:
    _append(transaction, rewards, batches)
    return _refuse_foreign_calls(transaction, rewards, "call_id", batches)


def log_metrics(transaction: Transaction, batches: Sequence[Rows]) -> list[None]:
    """Their `seq` must be given in the order of commits, or those who follow would miss some."""
    _append(transaction, metrics, batches)
    for run_id in {row[0] for batch in batches for row in batch}:
        transaction.tell(METRICS, run_id)
    return [None] * len(batches)


def put_resources(
    transaction: Transaction, actor: Actor, resources: Sequence[Resource], after: Mapping[str, int] | None = None
) -> list[Resource]:
    run_ids = {resource.run_id for resource in resources}
    require_runs(transaction.connection, run_ids)
    for resource in resources if after else ():
        _require_newest(transaction.connection, resource, after or {})
    for run_id in run_ids:
        transaction.tell(RESOURCES, run_id)
    stored = [_put(transaction, resource) for resource in resources]
    note_resources(transaction, actor, stored)
    return stored


def missing(connection: Connection, table: Table, new: Rows) -> StoreError:
    """Names the thing that rows refer to and that does not exist: asked when a foreign key refused them."""
    place = _places(table)
    require_runs(connection, {row[place["run_id"]] for row in new})
    if "attempt" not in place:
        return NotFoundError(f"{table.name}: they refer to what is not recorded")
    known = {
        tuple(row)
        for part in codec.chunks([row[place["rollout_id"]] for row in new])
        for row in connection.execute(
            select(attempts.c.rollout_id, attempts.c.attempt).where(attempts.c.rollout_id.in_(part))
        )
    }
    for row in new:
        rollout_id, attempt = row[place["rollout_id"]], row[place["attempt"]]
        if (rollout_id, attempt) not in known:
            return refusal("no_attempt", table.name, rollout_id, attempt)
    return refusal("no_call", table.name)


def read_calls(connection: Connection, rollout_ids: Sequence[str], attempt: int | None = None) -> list[Call]:
    found = []
    for part in codec.chunks(rollout_ids):
        query = select(calls).where(calls.c.rollout_id.in_(part))
        if attempt is None:
            latest = and_(rollouts.c.id == calls.c.rollout_id, rollouts.c.attempt == calls.c.attempt)
            query = query.join(rollouts, latest)
        else:
            query = query.where(calls.c.attempt == attempt)
        query = query.order_by(calls.c.rollout_id, calls.c.finished_ns, calls.c.id)
        found += [codec.CALLS.of_row(row) for row in connection.execute(query)]
    return found


def read_spans(connection: Connection, rollout_ids: Sequence[str]) -> list[Span]:
    return [
        codec.SPANS.of_row(row)
        for part in codec.chunks(rollout_ids)
        for row in connection.execute(
            select(spans)
            .where(spans.c.rollout_id.in_(part))
            .order_by(spans.c.rollout_id, spans.c.started_ns, spans.c.id)
        )
    ]


def read_rewards(connection: Connection, rollout_ids: Sequence[str]) -> list[Reward]:
    return [
        codec.REWARDS.of_row(row)
        for part in codec.chunks(rollout_ids)
        for row in connection.execute(
            select(rewards)
            .where(rewards.c.rollout_id.in_(part))
            .order_by(rewards.c.rollout_id, rewards.c.created_ns, rewards.c.seq)
        )
    ]


def read_resources(
    connection: Connection, run_id: str, name: str | None = None, latest: bool = True, version: int | None = None
) -> list[Resource]:
    query = select(resources).where(resources.c.run_id == run_id)
    if name is not None:
        query = query.where(resources.c.name == name)
    if version is not None:
        query = query.where(resources.c.version == version)
    elif latest:
        newest = and_(
            resource_versions.c.run_id == resources.c.run_id,
            resource_versions.c.name == resources.c.name,
            resource_versions.c.last == resources.c.version,
        )
        query = query.join(resource_versions, newest)
    query = query.order_by(resources.c.name, resources.c.version)
    return [codec.RESOURCES.of_row(row) for row in connection.execute(query)]


def read_later_resources(connection: Connection, run_id: str, after: Mapping[str, int]) -> list[Resource]:
    """The newest version of each resource that is later than `after` says; values of others are not read."""
    require_runs(connection, {run_id})
    versions = select(resource_versions.c.name, resource_versions.c.last).where(resource_versions.c.run_id == run_id)
    later = [(name, last) for name, last in connection.execute(versions) if last > after.get(name, 0)]
    if not later:
        return []
    chosen = tuple_(resources.c.name, resources.c.version).in_(later)
    query = select(resources).where(resources.c.run_id == run_id, chosen).order_by(resources.c.name)
    return [codec.RESOURCES.of_row(row) for row in connection.execute(query)]


def read_later_metrics(connection: Connection, run_id: str, after: int, limit: int) -> list[Metric]:
    require_runs(connection, {run_id})
    query = select(metrics).where(metrics.c.run_id == run_id, metrics.c.seq > after)
    return [codec.METRICS.of_row(row) for row in connection.execute(query.order_by(metrics.c.seq).limit(limit))]


def read_metrics(connection: Connection, run_id: str, name: str | None = None) -> list[Metric]:
    query = select(metrics).where(metrics.c.run_id == run_id)
    if name is not None:
        query = query.where(metrics.c.name == name)
    query = query.order_by(metrics.c.step, metrics.c.name, metrics.c.created_ns, metrics.c.seq)
    return [codec.METRICS.of_row(row) for row in connection.execute(query)]


def _append(transaction: Transaction, table: Table, batches: Sequence[Rows]) -> list[None]:
    transaction.insert_new(table, [row for batch in batches for row in batch])
    return [None] * len(batches)


def _refuse_foreign_calls(transaction: Transaction, table: Table, column: str, batches: Sequence[Rows]) -> list[None]:
    """NotFoundError where a row names a call of another rollout: neither could be deleted without the other.

    Asked after the rows are inserted: then each call that they name is there, whatever else had its id before.
    """
    place = _places(table)
    named = {
        (row[place[column]], row[place["rollout_id"]])
        for batch in batches
        for row in batch
        if row[place[column]] is not None
    }
    if named:
        ids = {"ids": sorted({call_id for call_id, _ in named})}
        if named - {tuple(row) for row in execute(transaction.connection, statements.WHOSE_CALLS, ids)}:
            raise refusal("no_call", table.name)
    return [None] * len(batches)


def _places(table: Table) -> dict[str, int]:
    """Places of a row's values by the names of its columns."""
    return {column.name: index for index, column in enumerate(c for c in table.columns if c.name != "seq")}


def _require_newest(connection: Connection, resource: Resource, after: Mapping[str, int]) -> None:
    """Refuses where a resource has another version than `after` says. Nobody puts one meanwhile: writers take turns."""
    if (expected := after.get(resource.name)) is None:
        return
    of_it = resource_versions.c.run_id == resource.run_id, resource_versions.c.name == resource.name
    newest = connection.execute(select(resource_versions.c.last).where(*of_it)).scalar() or 0
    if newest != expected:
        raise refusal("resource_changed", resource.name, resource.run_id, newest, expected)


def _put(transaction: Transaction, resource: Resource) -> Resource:
    first = upsert(transaction.connection, resource_versions)
    first = first.values(run_id=resource.run_id, name=resource.name, last=1)
    next_version = first.on_conflict_do_update(
        index_elements=["run_id", "name"], set_={"last": resource_versions.c.last + 1}
    )
    counted = transaction.connection.execute(next_version.returning(resource_versions.c.last))
    created_ns = resource.created_ns or transaction.now_ns
    stored = replace(resource, version=counted.scalar_one(), created_ns=created_ns)
    transaction.connection.execute(resources.insert(), codec.RESOURCES.columns(stored))
    return stored
