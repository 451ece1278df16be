"""Runs in SQL: their steps with what each consumed, checkpoints, tokens, model versions, numbers, the end of their data.

Methods of the writer take a transaction (and an actor where the act is noted), those that read a connection; base.py says
what they mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    LargeBinary,
    Table,
    Text,
    bindparam,
    cast,
    delete,
    func,
    insert,
    select,
    update,
)

from agentlightning.records import (
    FINAL_STATES,
    JSON,
    Attempt,
    Checkpoint,
    Consumed,
    Run,
    RunSize,
    RunState,
    RunStatistics,
    Step,
    WorkerStatus,
)
from agentlightning.store import codec, rules
from agentlightning.store.audit import Actor, AuditEntry, named_ids
from agentlightning.store.base import EXPIRING_S, SEEN_S
from agentlightning.store.models import ModelAlias, ModelVersion, changed_version, moved_alias, next_number
from agentlightning.store.notifier import ALIASES, FINISHED, METRICS, QUEUED, RESOURCES
from agentlightning.store.rules import check_run_id, refusal, run_ids
from agentlightning.store.sql import tables
from agentlightning.store.sql.database import execute_many, upsert
from agentlightning.store.sql.record import ENTRIES, drop_files, note, require_runs
from agentlightning.store.sql.tables import (
    attempts,
    audit,
    calls,
    checkpoints,
    consumption,
    credit,
    files,
    metrics,
    model_aliases,
    model_versions,
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
from agentlightning.store.sql.writer import SqlTransaction
from agentlightning.store.tokens import Token

_TOKENS, _MODELS, _ALIASES = codec.RecordCodec(Token), codec.RecordCodec(ModelVersion), codec.RecordCodec(ModelAlias)
_TOKEN = select(*[tokens.c[name] for name in _TOKENS.names])
_ENTRY = select(*[audit.c[name] for name in ENTRIES.names])
# rollout, outcome
_SET_OUTCOME = update(rollout_summaries).where(rollout_summaries.c.id == bindparam("rollout"))

PORTION = 50
"""Rollouts that one transaction deletes: some tens of milliseconds with ten calls each, during which others wait."""
METRICS_A_PORTION = 10_000

FOR_EVER = 2**62
"""Wakes everybody, whatever number its listener waits for."""


def create_run(transaction: SqlTransaction, actor: Actor, name: str, config: JSON, run_id: str | None = None) -> Run:
    if run_id is not None:
        check_run_id(run_id)
    connection, now_ns = transaction.connection, transaction.now_ns
    new = Run(
        id=run_id or _free_id(connection, now_ns),
        name=name,
        state="running",
        config=config,
        created_ns=now_ns,
        updated_ns=now_ns,
    )
    statement = upsert(connection, runs).on_conflict_do_nothing(index_elements=["id"])
    if connection.execute(statement.returning(runs.c.id), codec.RUNS.columns(new)).first() is None:
        raise refusal("run_exists", new.id)
    bind_token(transaction, actor, new.id)
    return _run(connection, new.id)


def update_run(
    transaction: SqlTransaction, actor: Actor, run_id: str, state: RunState | None = None, summary: JSON | None = None
) -> Run:
    run = _run(transaction.connection, run_id)
    if state is not None and state != run.state:
        note(transaction, actor, "update_run", run_id, run_id, {"from": run.state, "to": state})
    values = {
        "state": state or run.state,
        "summary": codec.dump({**run.summary, **(summary or {})}, "summary"),
        "updated_ns": transaction.now_ns,
    }
    transaction.connection.execute(update(runs).where(runs.c.id == run.id).values(values))
    return _run(transaction.connection, run.id)


def open_step(transaction: SqlTransaction, run_id: str, step: int, consumed: Sequence[Consumed]) -> Step:
    connection = transaction.connection
    require_runs(connection, {run_id})
    present = rules.present_step(_step(connection, run_id, step), run_id, step, consumed)
    if present is not None:
        return present
    wanted = [one.rollout_id for one in consumed]
    rules.check_listed(run_id, step, wanted, _listed(connection, wanted))
    opened = Step(run_id=run_id, step=step, state="open", consumed=list(consumed), created_ns=transaction.now_ns)
    values = {name: getattr(opened, name) for name in ("run_id", "step", "state", "created_ns")}
    step_id = connection.execute(insert(steps).values(values).returning(steps.c.id)).scalar_one()
    listed = [
        {**codec.CONSUMED.columns(one), "run_id": run_id, "mode": "train", "step_id": step_id, "position": position}
        for position, one in enumerate(consumed)
    ]
    if listed:
        connection.execute(insert(consumption), listed)
        outcomes = [{"rollout": one.rollout_id, "outcome": one.outcome} for one in consumed]
        execute_many(connection, _SET_OUTCOME, outcomes)
    return opened


def close_step(transaction: SqlTransaction, run_id: str, step: int, version: int) -> Step:
    closed = rules.closed_step(_step(transaction.connection, run_id, step), run_id, step, version)
    transaction.connection.execute(
        update(steps)
        .where(steps.c.run_id == run_id, steps.c.step == step, steps.c.state == "open")
        .values(state="closed", version=version)
    )
    return closed


def reopen_steps(transaction: SqlTransaction, run_id: str, after: int) -> list[Step]:
    connection = transaction.connection
    require_runs(connection, {run_id})
    closed = steps.c.run_id == run_id, steps.c.step > after, steps.c.state == "closed"
    connection.execute(update(steps).where(*closed).values(state="open", version=None))
    later = metrics.c.run_id == run_id, metrics.c.step > after
    connection.execute(update(metrics).where(*later).values(abandoned=True))
    return read_steps(connection, run_id, after=after)


def put_checkpoint(transaction: SqlTransaction, checkpoint: Checkpoint) -> None:
    require_runs(transaction.connection, {checkpoint.run_id})
    if checkpoint.step < 0:
        raise refusal("negative_step", checkpoint.step, checkpoint.run_id)
    new = replace(checkpoint, created_ns=checkpoint.created_ns or transaction.now_ns)
    statement = upsert(transaction.connection, checkpoints).values(asdict(new))
    changes = {name: statement.excluded[name] for name in ("path", "version", "created_ns")}
    transaction.connection.execute(statement.on_conflict_do_update(index_elements=["run_id", "step"], set_=changes))


def read_runs(connection: Connection, ids: Sequence[str] | None = None, limit: int | None = None) -> list[Run]:
    query = select(runs).order_by(runs.c.created_ns.desc(), runs.c.id.desc()).limit(limit)
    if ids is not None:
        query = query.where(runs.c.id.in_(ids))
    return [codec.RUNS.of_row(row) for row in connection.execute(query)]


def read_steps(connection: Connection, run_id: str, after: int | None = None, limit: int | None = None) -> list[Step]:
    query = select(steps).where(steps.c.run_id == run_id).order_by(steps.c.step).limit(limit)
    if after is not None:
        query = query.where(steps.c.step > after)
    found = connection.execute(query).all()
    consumed = defaultdict(list)
    wanted = select(consumption).where(consumption.c.step_id.in_([row.id for row in found]))
    for row in connection.execute(wanted.order_by(consumption.c.step_id, consumption.c.position)):
        values = {name: getattr(row, name) for name in codec.CONSUMED.names}
        consumed[row.step_id].append(codec.CONSUMED.record(values))
    return [
        Step(
            run_id=row.run_id,
            step=row.step,
            state=row.state,
            consumed=consumed[row.id],
            version=row.version,
            created_ns=row.created_ns,
        )
        for row in found
    ]


def read_checkpoints(connection: Connection, run_id: str) -> list[Checkpoint]:
    query = select(checkpoints).where(checkpoints.c.run_id == run_id).order_by(checkpoints.c.step)
    return [Checkpoint(**row._mapping) for row in connection.execute(query)]


def _free_id(connection: Connection, now_ns: int) -> str:
    taken = select(runs.c.id)
    return next(each for each in run_ids(now_ns) if connection.execute(taken.where(runs.c.id == each)).first() is None)


def _run(connection: Connection, run_id: str) -> Run:
    row = connection.execute(select(runs).where(runs.c.id == run_id)).first()
    if row is None:
        raise refusal("no_run", run_id)
    return codec.RUNS.of_row(row)


def _step(connection: Connection, run_id: str, step: int) -> Step | None:
    return next((found for found in read_steps(connection, run_id, step - 1, 1) if found.step == step), None)


def _listed(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, rules.ListedRollout]:
    columns = (rollouts.c.id, rollouts.c.run_id, rollouts.c.mode, rollouts.c.state, steps.c.step)
    eaten = rollouts.outerjoin(consumption, consumption.c.rollout_id == rollouts.c.id).outerjoin(
        steps, steps.c.id == consumption.c.step_id
    )
    return {
        row.id: rules.ListedRollout(run_id=row.run_id, mode=row.mode, state=row.state, step=row.step)
        for part in codec.chunks(rollout_ids)
        for row in connection.execute(select(*columns).select_from(eaten).where(rollouts.c.id.in_(part)))
    }


# --- tokens and the audit log ------------------------------------------------------------------------------------------


def bind_token(transaction: SqlTransaction, actor: Actor, run_id: str) -> None:
    """Give the actor's token the run that is created. ConflictError where it has one meanwhile."""
    if actor.binds is None:
        return
    free = tokens.c.id == actor.binds, tokens.c.run_id.is_(None), tokens.c.revoked_ns.is_(None)
    if transaction.connection.execute(update(tokens).where(*free).values(run_id=run_id)).rowcount == 0:
        raise refusal("token_has_run", actor.binds)


def add_token(
    transaction: SqlTransaction, actor: Actor, token: Token, secret_hash: str, lifetime_s: float | None
) -> Token:
    if token.run_id is not None:
        require_runs(transaction.connection, {token.run_id})
    expires_ns = None if lifetime_s is None else transaction.now_ns + int(lifetime_s * 1e9)
    token = replace(token, created_ns=transaction.now_ns, expires_ns=expires_ns)
    transaction.connection.execute(insert(tokens).values({**_TOKENS.columns(token), "secret_hash": secret_hash}))
    detail = {"name": token.name, "role": token.role, "lifetime_s": lifetime_s}
    note(transaction, actor, "create_token", token.id, token.run_id, detail)
    return token


def revoke_token(transaction: SqlTransaction, actor: Actor, token_id: str) -> Token:
    row = transaction.connection.execute(_TOKEN.where(tokens.c.id == token_id)).first()
    if row is None:
        raise refusal("no_token", token_id)
    token = _TOKENS.of_row(row)
    if token.revoked_ns is not None:
        return token
    revoked = update(tokens).where(tokens.c.id == token_id).values(revoked_ns=transaction.now_ns)
    transaction.connection.execute(revoked)
    note(transaction, actor, "revoke_token", token.id, token.run_id, {"name": token.name, "role": token.role})
    return replace(token, revoked_ns=transaction.now_ns)


def read_tokens(connection: Connection, run_id: str | None = None) -> list[Token]:
    query = _TOKEN.order_by(tokens.c.created_ns, tokens.c.id)
    if run_id is not None:
        query = query.where(tokens.c.run_id == run_id)
    return [_TOKENS.of_row(row) for row in connection.execute(query)]


def find_token(connection: Connection, secret_hash: str) -> Token | None:
    row = connection.execute(_TOKEN.where(tokens.c.secret_hash == secret_hash)).first()
    return None if row is None else _TOKENS.of_row(row)


def read_audit(
    connection: Connection, run_id: str | None = None, after: int = 0, limit: int = 1000
) -> list[AuditEntry]:
    query = _ENTRY.where(audit.c.seq > after).order_by(audit.c.seq).limit(limit)
    if run_id is not None:
        query = query.where(audit.c.run_id == run_id)
    return [ENTRIES.of_row(row) for row in connection.execute(query)]


# --- model versions ----------------------------------------------------------------------------------------------------


def put_model(transaction: SqlTransaction, actor: Actor, version: ModelVersion) -> ModelVersion:
    connection = transaction.connection
    if version.revision == 0:
        return _register(transaction, version)
    known = _find(connection, version.name, version.number)
    stored = changed_version(version, known, read_aliases(connection, version.name), transaction.now_ns)
    mine = model_versions.c.name == stored.name, model_versions.c.number == stored.number
    connection.execute(update(model_versions).where(*mine).values(_MODELS.columns(stored)))
    if known is not None and stored.deleted and not known.deleted:
        note(transaction, actor, "delete_model", stored.reference, stored.run_id, {"step": stored.step})
    return stored


def put_alias(transaction: SqlTransaction, actor: Actor, alias: ModelAlias, reason: JSON) -> ModelAlias:
    connection = transaction.connection
    known = next((one for one in read_aliases(connection, alias.name) if one.alias == alias.alias), None)
    version = None if alias.number is None else _find(connection, alias.name, alias.number)
    moved = moved_alias(alias, known, version, transaction.now_ns)
    columns = _ALIASES.columns(moved)
    if moved.number is None:
        mine = model_aliases.c.name == moved.name, model_aliases.c.alias == moved.alias
        connection.execute(delete(model_aliases).where(*mine))
        version = _find(connection, alias.name, moved.previous or 0)
    else:
        statement = upsert(connection, model_aliases).values(columns)
        connection.execute(statement.on_conflict_do_update(index_elements=["name", "alias"], set_=columns))
    detail = {"number": moved.number, "previous": moved.previous, "reason": reason}
    run_id = None if version is None else version.run_id
    note(transaction, actor, "set_alias", f"{moved.name}@{moved.alias}", run_id, detail)
    transaction.tell(ALIASES, moved.name)
    return moved


def read_models(connection: Connection, name: str | None = None, run_id: str | None = None) -> list[ModelVersion]:
    query = select(model_versions).order_by(model_versions.c.name, model_versions.c.number)
    if name is not None:
        query = query.where(model_versions.c.name == name)
    if run_id is not None:
        query = query.where(model_versions.c.run_id == run_id)
    return [_MODELS.of_row(row) for row in connection.execute(query)]


def read_aliases(connection: Connection, name: str | None = None) -> list[ModelAlias]:
    query = select(model_aliases).order_by(model_aliases.c.name, model_aliases.c.alias)
    if name is not None:
        query = query.where(model_aliases.c.name == name)
    return [_ALIASES.of_row(row) for row in connection.execute(query)]


def _register(transaction: SqlTransaction, version: ModelVersion) -> ModelVersion:
    connection = transaction.connection
    require_runs(connection, {version.run_id})
    own = [one for one in read_models(connection, run_id=version.run_id) if one.policy == version.policy]
    if known := [one for one in own if one.step == version.step]:
        return known[0]
    last = max(((one.number, one.step) for one in own if one.name == version.name), default=None)
    taken = select(model_versions.c.number).where(model_versions.c.name == version.name)
    number = next_number(connection.execute(taken).scalars().all(), last, version.step)
    new = replace(version, number=number, revision=1, created_ns=transaction.now_ns)
    connection.execute(insert(model_versions).values(_MODELS.columns(new)))
    return new


def _find(connection: Connection, name: str, number: int) -> ModelVersion | None:
    mine = model_versions.c.name == name, model_versions.c.number == number
    row = connection.execute(select(model_versions).where(*mine)).first()
    return None if row is None else _MODELS.of_row(row)


# --- numbers -----------------------------------------------------------------------------------------------------------


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


# --- the end of data ---------------------------------------------------------------------------------------------------


def drop_records(transaction: SqlTransaction, actor: Actor, rollout_ids: Sequence[str]) -> int:
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


def delete_portion(transaction: SqlTransaction, actor: Actor, run_id: str, first: bool) -> tuple[bool, bool]:
    """Delete some of a run; True if it was there, and True while there is more of it. The first portion is noted in the
    audit log."""
    connection = transaction.connection
    if first and connection.execute(select(runs.c.id).where(runs.c.id == run_id)).first() is None:
        return False, False
    if first:
        note(transaction, actor, "delete_runs", run_id, run_id, {})
    query = select(rollouts.c.id).where(rollouts.c.run_id == run_id).order_by(rollouts.c.id).limit(PORTION)
    some = connection.execute(query.with_for_update()).scalars().all()
    if some:
        _drop(connection, some)
        for table in (rewards, consumption, attempts):
            connection.execute(delete(table).where(table.c.rollout_id.in_(some)))
        connection.execute(delete(rollout_summaries).where(rollout_summaries.c.id.in_(some)))
        connection.execute(delete(rollouts).where(rollouts.c.id.in_(some)))
        return True, True
    old = select(metrics.c.seq).where(metrics.c.run_id == run_id).limit(METRICS_A_PORTION)
    if connection.execute(delete(metrics).where(metrics.c.seq.in_(old))).rowcount:
        return True, True
    if connection.execute(select(runs.c.id).where(runs.c.id == run_id).with_for_update()).first() is None:
        return True, False
    if connection.execute(query).first() is not None:  # enqueued before the run was locked
        return True, True
    for table in (metrics, workers, steps, checkpoints, resources, resource_versions, tokens, files):
        connection.execute(delete(table).where(table.c.run_id == run_id))
    connection.execute(delete(runs).where(runs.c.id == run_id))
    for about in (QUEUED, FINISHED, RESOURCES, METRICS):
        transaction.tell(about, run_id, FOR_EVER)
    return True, False
