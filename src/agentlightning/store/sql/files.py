"""Files in SQL, by the hash of their bytes, once per run, and the rollouts that use them.

Methods of the writer take a transaction, functions that read take a connection. base.py says what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, delete, exists, select

from agentlightning.store import codec
from agentlightning.store.sentences import refusal
from agentlightning.store.sql import tables
from agentlightning.store.sql.lifecycle import require_runs
from agentlightning.store.sql.tables import file_uses, rollouts
from agentlightning.store.sql.upsert import upsert
from agentlightning.store.sql.writer import Transaction


def put_files(transaction: Transaction, run_id: str, rollout_id: str | None, files: Mapping[str, bytes]) -> None:
    connection = transaction.connection
    require_runs(connection, {run_id})
    mine = select(rollouts.c.id).where(rollouts.c.id == rollout_id, rollouts.c.run_id == run_id)
    if rollout_id is not None and connection.execute(mine).first() is None:
        raise refusal("no_file_user", rollout_id, run_id)
    for name, data in sorted(files.items()):
        new = upsert(connection, tables.files).values(run_id=run_id, hash=name, data=data)
        # An update of what is there already keeps whoever drops records from deleting it before this commits.
        kept = new.on_conflict_do_update(index_elements=["run_id", "hash"], set_={"hash": name})
        connection.execute(kept)
        if rollout_id is not None:
            use = upsert(connection, file_uses).values(rollout_id=rollout_id, run_id=run_id, hash=name)
            connection.execute(use.on_conflict_do_nothing())


def read_files(connection: Connection, run_id: str, hashes: Sequence[str]) -> dict[str, bytes]:
    found = {}
    for part in codec.chunks(hashes):
        query = select(tables.files.c.hash, tables.files.c.data).where(
            tables.files.c.run_id == run_id, tables.files.c.hash.in_(part)
        )
        found.update({row.hash: bytes(row.data) for row in connection.execute(query)})
    return found


def drop_files(connection: Connection, rollout_ids: Sequence[str]) -> None:
    """Delete the files that these rollouts used and no other does."""
    mine = file_uses.c.rollout_id.in_(rollout_ids)
    used = connection.execute(select(file_uses.c.run_id, file_uses.c.hash).where(mine).distinct()).all()
    connection.execute(delete(file_uses).where(mine))
    for run_id, name in used:
        this = tables.files.c.run_id == run_id, tables.files.c.hash == name
        other = exists().where(file_uses.c.run_id == run_id, file_uses.c.hash == name)
        connection.execute(delete(tables.files).where(*this, ~other))
