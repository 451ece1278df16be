"""Credit in SQL: what training steps learned from calls, a row per call.

Methods of the writer take a transaction, functions that read take a connection. base.py says what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, select, true

from agentlightning.records import CallCredit
from agentlightning.store import codec
from agentlightning.store.sentences import refusal
from agentlightning.store.sql.tables import credit, rollouts
from agentlightning.store.sql.upsert import upsert
from agentlightning.store.sql.writer import Transaction


def record_credit(transaction: Transaction, credits: Sequence[CallCredit]) -> None:
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


def drop_credit(transaction: Transaction, run_id: str, before: int) -> None:
    transaction.connection.execute(delete(credit).where(credit.c.run_id == run_id, credit.c.step < before))
