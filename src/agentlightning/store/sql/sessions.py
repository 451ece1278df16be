"""Sessions in SQL: opened or continued in one transaction, and their rewards, which may come after their end.

Methods of the writer; session_store.py says what they mean. How sessions end is in lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, select, update

from agentlightning.records import SESSION, Rollout
from agentlightning.store import codec
from agentlightning.store.base import final_reward
from agentlightning.store.sentences import refusal
from agentlightning.store.session_store import HOLDER
from agentlightning.store.sql import lifecycle, statements
from agentlightning.store.sql.prepared import execute, execute_many
from agentlightning.store.sql.prompts import pin_templates, require_templates
from agentlightning.store.sql.record import Rows, read_rewards, record_rewards
from agentlightning.store.sql.tables import rollout_summaries, rollouts
from agentlightning.store.sql.writer import Transaction


@dataclass(frozen=True, slots=True)
class SessionRequest:
    session: Rollout
    """As it is where it begins: queued, with its id and the replica 0."""
    token: str
    lease_s: float


def open_sessions(transaction: Transaction, requests: Sequence[SessionRequest]) -> list[Rollout]:
    lifecycle.require_runs(transaction.connection, {request.session.run_id for request in requests})
    return [_open(transaction, request) for request in requests]  # in turn: two of them may be of one session


def record_feedback(transaction: Transaction, batches: Sequence[Rows]) -> list[None]:
    new = [row for batch in batches for row in batch]
    connection = transaction.connection
    whose, run = codec.REWARDS.names.index("rollout_id"), codec.REWARDS.names.index("run_id")
    query = select(rollouts.c.id, rollouts.c.run_id, rollouts.c.state, rollouts.c.attempt, rollouts.c.group_id)
    found = {
        row.id: row
        for part in codec.chunks(row[whose] for row in new)
        for row in connection.execute(query.where(rollouts.c.id.in_(part)))
    }
    for row in new:
        known = found.get(row[whose])
        if known is None or known.run_id != row[run] or not known.group_id.startswith(SESSION):
            raise refusal("no_session", row[whose], row[run])
    record_rewards(transaction, [new])
    for row in found.values():
        if row.state == "succeeded":  # of others it is settled when they end
            _settle_again(connection, row.id, row.attempt)
    return [None] * len(batches)


def _settle_again(connection: Connection, rollout_id: str, attempt: int) -> None:
    recorded = [reward for reward in read_rewards(connection, [rollout_id]) if reward.attempt == attempt]
    settled = {"reward": final_reward(recorded)}
    connection.execute(update(rollouts).where(rollouts.c.id == rollout_id).values(settled))
    connection.execute(update(rollout_summaries).where(rollout_summaries.c.id == rollout_id).values(settled))


def _open(transaction: Transaction, request: SessionRequest) -> Rollout:
    connection, session = transaction.connection, request.session
    expires_ns = transaction.now_ns + int(request.lease_s * 1e9)
    of_group = rollouts.c.run_id == session.run_id, rollouts.c.group_id == session.group_id
    query = statements.ROLLOUT.where(*of_group).order_by(rollouts.c.replica.desc()).limit(1)
    row = connection.execute(query).first()
    last = None if row is None else codec.ROLLOUTS.of_row(row)
    if last is not None and last.state == "running":
        execute(connection, statements.EXTEND_LEASES, {"ids": [last.id], "expires": expires_ns})
        return last
    begun = replace(
        session,
        replica=0 if last is None else last.replica + 1,
        state="running",
        attempt=1,
        started_ns=transaction.now_ns,
    )
    columns = codec.ROLLOUTS.columns(begun)
    require_templates(connection, [columns])
    execute_many(connection, statements.enqueue_rollouts(connection.dialect.name), [columns])
    [begun] = pin_templates(connection, session.run_id, [begun])
    started = {
        "rollout_id": begun.id,
        "attempt": 1,
        "state": "running",
        "worker_id": HOLDER,
        "token": request.token,
        "lease_expires_ns": expires_ns,
        "started_ns": transaction.now_ns,
    }
    execute_many(connection, statements.START_ATTEMPT, [started])
    return begun
