"""The end of data in SQL: records of rollouts that are dropped, and runs that are deleted with all that belongs to them.

Methods of the writer: which data have become old is decided elsewhere. base.py says what the methods mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import Connection, delete, select, update

from agentlightning.records import FINAL_STATES
from agentlightning.store import codec
from agentlightning.store.audit import Actor, named_ids
from agentlightning.store.notifier import FINISHED, METRICS, QUEUED, RESOURCES
from agentlightning.store.sentences import refusal
from agentlightning.store.sql.access import note
from agentlightning.store.sql.files import drop_files
from agentlightning.store.sql.models import delete_models_of_run
from agentlightning.store.sql.tables import (
    attempts,
    calls,
    checkpoints,
    consumption,
    credit,
    files,
    metrics,
    resource_versions,
    resources,
    rewards,
    rollout_summaries,
    rollouts,
    runs,
    spans,
    steps,
    tokens,
    workers,
)
from agentlightning.store.sql.writer import Transaction

PORTION = 50
"""Rollouts that one transaction deletes: some tens of milliseconds with ten calls each, during which others wait."""
METRICS_A_PORTION = 10_000

FOR_EVER = 2**62
"""Wakes everybody, whatever number its listener waits for."""


def drop_records(transaction: Transaction, actor: Actor, rollout_ids: Sequence[str]) -> int:
    connection, parts = transaction.connection, list(codec.chunks(rollout_ids))
    by_run: dict[str, list[str]] = defaultdict(list)
    for part in parts:
        for known in connection.execute(select(rollouts.c.id, rollouts.c.run_id).where(rollouts.c.id.in_(part))):
            by_run[known.run_id].append(known.id)
        live = select(rollouts.c.id, rollouts.c.state).where(
            rollouts.c.id.in_(part), rollouts.c.state.not_in(FINAL_STATES)
        )
        if (row := connection.execute(live.order_by(rollouts.c.id)).first()) is not None:
            raise refusal("has_records_to_come", row.id, row.state)
    for run_id, ids in sorted(by_run.items()):
        note(transaction, actor, "drop_records", run_id, run_id, named_ids(ids))
    return sum(_drop(connection, part) for part in parts)


def _drop(connection: Connection, rollout_ids: Sequence[str]) -> int:
    """Calls, spans and files, once nobody appends to them; how many calls."""
    connection.execute(select(attempts.c.attempt).where(attempts.c.rollout_id.in_(rollout_ids)).with_for_update()).all()
    named = rewards.c.rollout_id.in_(rollout_ids), rewards.c.call_id.is_not(None)
    connection.execute(update(rewards).where(*named).values(call_id=None))
    for table in (spans, credit):
        connection.execute(delete(table).where(table.c.rollout_id.in_(rollout_ids)))
    drop_files(connection, rollout_ids)
    return connection.execute(delete(calls).where(calls.c.rollout_id.in_(rollout_ids))).rowcount


def delete_portion(transaction: Transaction, actor: Actor, run_id: str, first: bool) -> bool:
    """Delete some of a run; True while there is more of it. The first portion is noted in the audit log."""
    connection = transaction.connection
    if first:
        delete_models_of_run(transaction, actor, run_id)
        note(transaction, actor, "delete_runs", run_id, run_id, {})
    query = select(rollouts.c.id).where(rollouts.c.run_id == run_id).order_by(rollouts.c.id).limit(PORTION)
    some = connection.execute(query.with_for_update()).scalars().all()
    if some:
        _drop(connection, some)
        for table in (rewards, consumption, attempts):
            connection.execute(delete(table).where(table.c.rollout_id.in_(some)))
        connection.execute(delete(rollout_summaries).where(rollout_summaries.c.id.in_(some)))
        connection.execute(delete(rollouts).where(rollouts.c.id.in_(some)))
        return True
    old = select(metrics.c.seq).where(metrics.c.run_id == run_id).limit(METRICS_A_PORTION)
    if connection.execute(delete(metrics).where(metrics.c.seq.in_(old))).rowcount:
        return True
    if connection.execute(select(runs.c.id).where(runs.c.id == run_id).with_for_update()).first() is None:
        return False
    if connection.execute(query).first() is not None:  # enqueued before the run was locked
        return True
    delete_models_of_run(transaction, actor, run_id)  # those that were registered meanwhile
    for table in (metrics, workers, steps, checkpoints, resources, resource_versions, tokens, files):
        connection.execute(delete(table).where(table.c.run_id == run_id))
    connection.execute(delete(runs).where(runs.c.id == run_id))
    for about in (QUEUED, FINISHED, RESOURCES, METRICS):
        transaction.tell(about, run_id, FOR_EVER)
    return False
