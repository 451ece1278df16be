"""The record in SQL: calls, spans, rewards and credit of attempts, files; resources, metrics and the audit log of runs.

Methods of the writer take a transaction and a list of arguments, one a caller (rows of hot tables come ready made, see
codec.py, so that a group of callers is one executemany); functions that read take a connection. base.py says what they mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    delete,
    exists,
    false,
    func,
    insert,
    select,
    true,
    tuple_,
    update,
)

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.records import JSON, Call, CallCredit, Metric, Resource, Reward, Span
from agentlightning.store import codec
from agentlightning.store.audit import AUDITED_KINDS, Actor, AuditEntry, noted_value
from agentlightning.store.notifier import METRICS, RESOURCES
from agentlightning.store.rules import refusal
from agentlightning.store.sql.database import execute, insert_new, upsert
from agentlightning.store.sql.tables import (
    attempts,
    audit,
    calls,
    credit,
    file_uses,
    metrics,
    resource_versions,
    resources,
    rewards,
    rollouts,
    runs,
    spans,
)
from agentlightning.store.sql.tables import files as kept_files
from agentlightning.store.sql.writer import SqlTransaction
from agentlightning.store.summaries import SeriesPoint, bucket_width

ENTRIES = codec.RecordCodec(AuditEntry)
_RUNS = select(runs.c.id).where(runs.c.id.in_(bindparam("ids", expanding=True)))
_WHOSE_CALLS = select(calls.c.id, calls.c.rollout_id).where(calls.c.id.in_(bindparam("ids", expanding=True)))

Rows = list[tuple[Any, ...]]


def require_runs(connection: Connection, run_ids: Collection[str]) -> None:
    """NotFoundError that names the runs which do not exist."""
    found = {row.id for row in execute(connection, _RUNS, {"ids": list(run_ids)})}
    if missing := sorted(set(run_ids) - found):
        raise refusal("no_run", ", ".join(missing))


def whose_calls(connection: Connection, call_ids: Collection[str]) -> set[tuple[str, str]]:
    """Those of these calls that are recorded, each with its rollout."""
    found = execute(connection, _WHOSE_CALLS, {"ids": sorted(call_ids)}) if call_ids else []
    return {(row.id, row.rollout_id) for row in found}


def note(
    transaction: SqlTransaction, actor: Actor, action: str, subject: str, run_id: str | None, detail: JSON
) -> None:
    """Add an entry to the audit log, in the transaction of the act."""
    entry = AuditEntry(
        seq=0,
        created_ns=transaction.now_ns,
        actor=codec.text(actor.name) or "",
        action=action,
        subject=codec.text(subject) or "",
        run_id=run_id,
        detail=detail,
    )
    columns = ENTRIES.columns(entry)
    del columns["seq"]
    transaction.connection.execute(insert(audit).values(columns))


def append_calls(transaction: SqlTransaction, batches: Sequence[Rows]) -> list[None]:
    _append(transaction, calls, batches)
    return _refuse_foreign_calls(transaction, calls, "parent_id", batches)


def mark_delivered(
    transaction: SqlTransaction, rollout_id: str, attempt: int, call_ids: Sequence[str], delivered: bool
) -> None:
    mine = calls.c.rollout_id == rollout_id, calls.c.attempt == attempt, calls.c.id.in_(call_ids)
    transaction.connection.execute(update(calls).where(*mine).values(delivered=delivered))


def append_spans(transaction: SqlTransaction, batches: Sequence[Rows]) -> list[None]:
    return _append(transaction, spans, batches)


def record_rewards(transaction: SqlTransaction, batches: Sequence[Rows]) -> list[None]:
    _append(transaction, rewards, batches)
    return _refuse_foreign_calls(transaction, rewards, "call_id", batches)


def log_metrics(transaction: SqlTransaction, batches: Sequence[Rows]) -> list[None]:
    """Their `seq` must be given in the order of commits, or those who follow would miss some."""
    _append(transaction, metrics, batches)
    for run_id in {row[0] for batch in batches for row in batch}:
        transaction.tell(METRICS, run_id)
    return [None] * len(batches)


def put_resources(
    transaction: SqlTransaction, actor: Actor, resources: Sequence[Resource], after: Mapping[str, int] | None = None
) -> list[Resource]:
    run_ids = {resource.run_id for resource in resources}
    require_runs(transaction.connection, run_ids)
    for resource in resources if after else ():
        _require_newest(transaction.connection, resource, after or {})
    for run_id in run_ids:
        transaction.tell(RESOURCES, run_id)
    stored = [_put(transaction, resource) for resource in resources]
    for resource in stored:
        if resource.kind in AUDITED_KINDS:
            detail = {**noted_value(resource), "kind": resource.kind, "version": resource.version}
            note(transaction, actor, "put_resources", resource.name, resource.run_id, detail)
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


def _append(transaction: SqlTransaction, table: Table, batches: Sequence[Rows]) -> list[None]:
    insert_new(transaction.connection, table, [row for batch in batches for row in batch])
    return [None] * len(batches)


def _refuse_foreign_calls(
    transaction: SqlTransaction, table: Table, column: str, batches: Sequence[Rows]
) -> list[None]:
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
    if named - whose_calls(transaction.connection, {call_id for call_id, _ in named}):
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


def _put(transaction: SqlTransaction, resource: Resource) -> Resource:
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


# --- files -------------------------------------------------------------------------------------------------------------


def put_files(transaction: SqlTransaction, run_id: str, rollout_id: str | None, files: Mapping[str, bytes]) -> None:
    connection = transaction.connection
    require_runs(connection, {run_id})
    mine = select(rollouts.c.id).where(rollouts.c.id == rollout_id, rollouts.c.run_id == run_id)
    if rollout_id is not None and connection.execute(mine).first() is None:
        raise refusal("no_file_user", rollout_id, run_id)
    for name, data in sorted(files.items()):
        new = upsert(connection, kept_files).values(run_id=run_id, hash=name, data=data)
        # An update of what is there already keeps whoever drops records from deleting it before this commits.
        kept = new.on_conflict_do_update(index_elements=["run_id", "hash"], set_={"hash": name})
        connection.execute(kept)
        if rollout_id is not None:
            use = upsert(connection, file_uses).values(rollout_id=rollout_id, run_id=run_id, hash=name)
            connection.execute(use.on_conflict_do_nothing())


def read_files(connection: Connection, run_id: str, hashes: Sequence[str]) -> dict[str, bytes]:
    found = {}
    for part in codec.chunks(hashes):
        query = select(kept_files.c.hash, kept_files.c.data).where(
            kept_files.c.run_id == run_id, kept_files.c.hash.in_(part)
        )
        found.update({row.hash: bytes(row.data) for row in connection.execute(query)})
    return found


def drop_files(connection: Connection, rollout_ids: Sequence[str]) -> None:
    """Delete the files that these rollouts used and no other does."""
    mine = file_uses.c.rollout_id.in_(rollout_ids)
    used = connection.execute(select(file_uses.c.run_id, file_uses.c.hash).where(mine).distinct()).all()
    connection.execute(delete(file_uses).where(mine))
    for run_id, name in used:
        this = kept_files.c.run_id == run_id, kept_files.c.hash == name
        other = exists().where(file_uses.c.run_id == run_id, file_uses.c.hash == name)
        connection.execute(delete(kept_files).where(*this, ~other))


# --- credit ------------------------------------------------------------------------------------------------------------


def record_credit(transaction: SqlTransaction, credits: Sequence[CallCredit]) -> None:
    connection = transaction.connection
    rows = [dict(zip(codec.CREDIT.names, codec.credit_row(one), strict=True)) for one in credits]
    # Locked until the commit: whoever deletes a rollout's records meanwhile comes before this, or after it.
    known = {
        tuple(row)
        for part in codec.chunks(one.rollout_id for one in credits)
        for row in connection.execute(
            select(rollouts.c.id, rollouts.c.run_id).where(rollouts.c.id.in_(part)).with_for_update(read=True)
        )
    }
    for one in credits:
        if (one.rollout_id, one.run_id) not in known:
            raise refusal("no_credited_rollout", one.rollout_id, one.run_id)
    if rows:
        new = upsert(connection, credit)
        keys = [column.name for column in credit.primary_key]
        replaced = {name: new.excluded[name] for name in codec.CREDIT.names if name not in keys}
        connection.execute(new.on_conflict_do_update(index_elements=keys, set_=replaced), rows)


def read_credit(
    connection: Connection, rollout_ids: Sequence[str], call_ids: Sequence[str] | None = None
) -> list[CallCredit]:
    of_calls = [true()] if call_ids is None else [credit.c.call_id.in_(part) for part in codec.chunks(call_ids)]
    found = [
        codec.CREDIT.of_row(row)
        for part in codec.chunks(rollout_ids)
        for wanted in of_calls
        for row in connection.execute(select(credit).where(credit.c.rollout_id.in_(part), wanted))
    ]
    return sorted(found, key=lambda each: (each.rollout_id, each.call_id))


def drop_credit(transaction: SqlTransaction, run_id: str, before: int) -> None:
    transaction.connection.execute(delete(credit).where(credit.c.run_id == run_id, credit.c.step < before))


# --- metrics over steps ------------------------------------------------------------------------------------------------


def read_series(
    connection: Connection, run_id: str, names: Sequence[str] | None, max_points: int, after_step: int | None
) -> dict[str, list[SeriesPoint]]:
    require_runs(connection, {run_id})
    chosen: list[ColumnElement[bool]] = [
        metrics.c.run_id == run_id,
        metrics.c.abandoned == false(),
        metrics.c.value.is_not(None),
    ]
    if names is not None:
        chosen.append(metrics.c.name.in_(names))
    if after_step is not None:
        chosen.append(metrics.c.step > after_step)
    first, last = connection.execute(select(func.min(metrics.c.step), func.max(metrics.c.step)).where(*chosen)).one()
    if first is None:
        return {}
    bucket = (metrics.c.step - first) // bucket_width(first, last, max_points)
    buckets = (
        select(
            func.min(metrics.c.value).label("low"),
            func.max(metrics.c.value).label("high"),
            func.max(metrics.c.seq).label("seq"),
        )
        .where(*chosen)
        .group_by(metrics.c.name, bucket)
        .subquery()
    )
    points = select(metrics, buckets.c.low, buckets.c.high).join(buckets, buckets.c.seq == metrics.c.seq)
    found: defaultdict[str, list[SeriesPoint]] = defaultdict(list)
    for row in connection.execute(points.order_by(metrics.c.name, metrics.c.step)):
        point = SeriesPoint(step=row.step, value=row.value, low=row.low, high=row.high, created_ns=row.created_ns)
        found[row.name].append(point)
    return dict(found)
