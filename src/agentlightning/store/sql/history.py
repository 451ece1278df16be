"""Runs in SQL: their steps with what each consumed, checkpoints, tokens, model versions, numbers, the end of their data.

Methods of the writer take a transaction, those that read a connection; base.py says what they mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace

import sqlalchemy as sa

from agentlightning.records import (
    FINAL_STATES,
    JSON,
    Attempt,
    Checkpoint,
    Consumed,
    Run,
    RunState,
    RunStatistics,
    Step,
    WorkerStatus,
)
from agentlightning.store import codec, rules
from agentlightning.store.base import EXPIRING_S, SEEN_S
from agentlightning.store.models import ModelAlias, ModelVersion, changed_version, moved_alias, next_number
from agentlightning.store.rules import check_run_id, refusal, run_ids
from agentlightning.store.sql import tables
from agentlightning.store.sql.database import execute_many, upsert
from agentlightning.store.sql.record import drop_files, only, require_runs, rows_by_ids
from agentlightning.store.sql.tables import (
    attempts,
    calls,
    checkpoints,
    consumption,
    metrics,
    model_aliases,
    model_versions,
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
from agentlightning.store.waiting import ALIASES, FINISHED, METRICS, QUEUED, RESOURCES

_TOKENS, _MODELS, _ALIASES = codec.RecordCodec(Token), codec.RecordCodec(ModelVersion), codec.RecordCodec(ModelAlias)
_TOKEN = sa.select(*[tokens.c[name] for name in _TOKENS.names])
# rollout, outcome
_SET_OUTCOME = sa.update(rollout_summaries).where(rollout_summaries.c.id == sa.bindparam("rollout"))

PORTION = 50
"""Rollouts that one transaction deletes: some tens of milliseconds with ten calls each, during which others wait."""
METRICS_A_PORTION = 10_000

FOR_EVER = 2**62  # wakes everybody, whatever number its listener waits for


# --- runs, steps, checkpoints -------------------------------------------------------------------------------------------


def create_run(
    transaction: SqlTransaction, name: str, config: JSON, run_id: str | None = None, binds: str | None = None
) -> Run:
    if run_id is not None:
        check_run_id(run_id)
    connection, now_ns = transaction.connection, transaction.now_ns
    chosen = run_id or next(each for each in run_ids(now_ns) if not read_runs(connection, [each]))
    new = Run(id=chosen, name=name, state="running", config=config, created_ns=now_ns, updated_ns=now_ns)
    statement = upsert(connection, runs).on_conflict_do_nothing(index_elements=["id"])
    if connection.execute(statement.returning(runs.c.id), codec.RUNS.columns(new)).first() is None:
        raise refusal("run_exists", new.id)
    if binds is not None:  # a token whose first run this is
        free = tokens.c.id == binds, tokens.c.run_id.is_(None), tokens.c.revoked_ns.is_(None)
        if connection.execute(sa.update(tokens).where(*free).values(run_id=new.id)).rowcount == 0:
            raise refusal("token_has_run", binds)
    return _run(connection, new.id)


def update_run(
    transaction: SqlTransaction, run_id: str, state: RunState | None = None, summary: JSON | None = None
) -> Run:
    run = _run(transaction.connection, run_id)
    values = {
        "state": state or run.state,
        "summary": codec.dump({**run.summary, **(summary or {})}, "summary"),
        "updated_ns": transaction.now_ns,
    }
    transaction.connection.execute(sa.update(runs).where(runs.c.id == run.id).values(values))
    return _run(transaction.connection, run.id)


def read_runs(connection: sa.Connection, ids: Sequence[str] | None = None, limit: int | None = None) -> list[Run]:
    query = sa.select(runs).order_by(runs.c.created_ns.desc(), runs.c.id.desc()).limit(limit)
    if ids is not None:
        query = query.where(runs.c.id.in_(ids))
    return [codec.RUNS.of_row(row) for row in connection.execute(query)]


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
    step_id = connection.execute(sa.insert(steps).values(values).returning(steps.c.id)).scalar_one()
    listed = [
        {**codec.CONSUMED.columns(one), "run_id": run_id, "mode": "train", "step_id": step_id, "position": position}
        for position, one in enumerate(consumed)
    ]
    if listed:
        connection.execute(sa.insert(consumption), listed)
        outcomes = [{"rollout": one.rollout_id, "outcome": one.outcome} for one in consumed]
        execute_many(connection, _SET_OUTCOME, outcomes)
    return opened


def close_step(transaction: SqlTransaction, run_id: str, step: int, version: int) -> Step:
    closed = rules.closed_step(_step(transaction.connection, run_id, step), run_id, step, version)
    mine = steps.c.run_id == run_id, steps.c.step == step, steps.c.state == "open"
    transaction.connection.execute(sa.update(steps).where(*mine).values(state="closed", version=version))
    return closed


def reopen_steps(transaction: SqlTransaction, run_id: str, after: int) -> list[Step]:
    connection = transaction.connection
    require_runs(connection, {run_id})
    closed = steps.c.run_id == run_id, steps.c.step > after, steps.c.state == "closed"
    connection.execute(sa.update(steps).where(*closed).values(state="open", version=None))
    later = metrics.c.run_id == run_id, metrics.c.step > after
    connection.execute(sa.update(metrics).where(*later).values(abandoned=True))
    return read_steps(connection, run_id, after=after)


def read_steps(
    connection: sa.Connection, run_id: str, after: int | None = None, limit: int | None = None
) -> list[Step]:
    query = sa.select(steps).where(steps.c.run_id == run_id).order_by(steps.c.step).limit(limit)
    if after is not None:
        query = query.where(steps.c.step > after)
    found = connection.execute(query).all()
    consumed: defaultdict[int, list[Consumed]] = defaultdict(list)
    wanted = sa.select(consumption).where(consumption.c.step_id.in_([row.id for row in found]))
    for row in connection.execute(wanted.order_by(consumption.c.step_id, consumption.c.position)):
        values = {name: getattr(row, name) for name in codec.CONSUMED.names}
        consumed[row.step_id].append(codec.CONSUMED.record(values))
    names = ("run_id", "step", "state", "version", "created_ns")
    return [Step(consumed=consumed[row.id], **{name: getattr(row, name) for name in names}) for row in found]


def put_checkpoint(transaction: SqlTransaction, checkpoint: Checkpoint) -> None:
    require_runs(transaction.connection, {checkpoint.run_id})
    if checkpoint.step < 0:
        raise refusal("negative_step", checkpoint.step, checkpoint.run_id)
    new = replace(checkpoint, created_ns=checkpoint.created_ns or transaction.now_ns)
    statement = upsert(transaction.connection, checkpoints).values(asdict(new))
    changes = {name: statement.excluded[name] for name in ("path", "version", "created_ns")}
    transaction.connection.execute(statement.on_conflict_do_update(index_elements=["run_id", "step"], set_=changes))


def read_checkpoints(connection: sa.Connection, run_id: str) -> list[Checkpoint]:
    query = sa.select(checkpoints).where(checkpoints.c.run_id == run_id).order_by(checkpoints.c.step)
    return [Checkpoint(**row._mapping) for row in connection.execute(query)]


def _run(connection: sa.Connection, run_id: str) -> Run:
    found = read_runs(connection, [run_id])
    if not found:
        raise refusal("no_run", run_id)
    return found[0]


def _step(connection: sa.Connection, run_id: str, step: int) -> Step | None:
    return next((found for found in read_steps(connection, run_id, step - 1, 1) if found.step == step), None)


def _listed(connection: sa.Connection, rollout_ids: Sequence[str]) -> dict[str, rules.ListedRollout]:
    eaten = rollouts.outerjoin(consumption, consumption.c.rollout_id == rollouts.c.id).outerjoin(
        steps, steps.c.id == consumption.c.step_id
    )
    columns = (rollouts.c.id, rollouts.c.run_id, rollouts.c.mode, rollouts.c.state, steps.c.step)
    return {
        row.id: rules.ListedRollout(run_id=row.run_id, mode=row.mode, state=row.state, step=row.step)
        for row in rows_by_ids(connection, sa.select(*columns).select_from(eaten), rollouts.c.id, rollout_ids)
    }


# --- tokens -------------------------------------------------------------------------------------------------------------


def add_token(transaction: SqlTransaction, token: Token, secret_hash: str, lifetime_s: float | None) -> Token:
    if token.run_id is not None:
        require_runs(transaction.connection, {token.run_id})
    expires_ns = None if lifetime_s is None else transaction.now_ns + int(lifetime_s * 1e9)
    token = replace(token, created_ns=transaction.now_ns, expires_ns=expires_ns)
    transaction.connection.execute(sa.insert(tokens).values({**_TOKENS.columns(token), "secret_hash": secret_hash}))
    return token


def revoke_token(transaction: SqlTransaction, token_id: str) -> Token:
    row = transaction.connection.execute(_TOKEN.where(tokens.c.id == token_id)).first()
    if row is None:
        raise refusal("no_token", token_id)
    token = _TOKENS.of_row(row)
    if token.revoked_ns is not None:
        return token
    revoked = sa.update(tokens).where(tokens.c.id == token_id).values(revoked_ns=transaction.now_ns)
    transaction.connection.execute(revoked)
    return replace(token, revoked_ns=transaction.now_ns)


def read_tokens(connection: sa.Connection, run_id: str | None = None) -> list[Token]:
    query = _TOKEN.order_by(tokens.c.created_ns, tokens.c.id)
    return [_TOKENS.of_row(row) for row in connection.execute(only(query, tokens.c.run_id, run_id))]


def find_token(connection: sa.Connection, secret_hash: str) -> Token | None:
    row = connection.execute(_TOKEN.where(tokens.c.secret_hash == secret_hash)).first()
    return None if row is None else _TOKENS.of_row(row)


# --- model versions -----------------------------------------------------------------------------------------------------


def put_model(transaction: SqlTransaction, version: ModelVersion) -> ModelVersion:
    if version.revision == 0:
        return _register(transaction, version)
    known = _find(transaction.connection, version.name, version.number)
    stored = changed_version(version, known, read_aliases(transaction.connection, version.name), transaction.now_ns)
    mine = model_versions.c.name == stored.name, model_versions.c.number == stored.number
    transaction.connection.execute(sa.update(model_versions).where(*mine).values(_MODELS.columns(stored)))
    return stored


def put_alias(transaction: SqlTransaction, alias: ModelAlias) -> ModelAlias:
    connection = transaction.connection
    known = next((one for one in read_aliases(connection, alias.name) if one.alias == alias.alias), None)
    version = None if alias.number is None else _find(connection, alias.name, alias.number)
    moved = moved_alias(alias, known, version, transaction.now_ns)
    if moved.number is None:
        mine = model_aliases.c.name == moved.name, model_aliases.c.alias == moved.alias
        connection.execute(sa.delete(model_aliases).where(*mine))
    else:
        columns = _ALIASES.columns(moved)
        statement = upsert(connection, model_aliases).values(columns)
        connection.execute(statement.on_conflict_do_update(index_elements=["name", "alias"], set_=columns))
    transaction.tell(ALIASES, moved.name)
    return moved


def read_models(connection: sa.Connection, name: str | None = None, run_id: str | None = None) -> list[ModelVersion]:
    query = sa.select(model_versions).order_by(model_versions.c.name, model_versions.c.number)
    query = only(only(query, model_versions.c.name, name), model_versions.c.run_id, run_id)
    return [_MODELS.of_row(row) for row in connection.execute(query)]


def read_aliases(connection: sa.Connection, name: str | None = None) -> list[ModelAlias]:
    query = sa.select(model_aliases).order_by(model_aliases.c.name, model_aliases.c.alias)
    return [_ALIASES.of_row(row) for row in connection.execute(only(query, model_aliases.c.name, name))]


def _register(transaction: SqlTransaction, version: ModelVersion) -> ModelVersion:
    connection = transaction.connection
    require_runs(connection, {version.run_id})
    own = [one for one in read_models(connection, run_id=version.run_id) if one.policy == version.policy]
    if known := [one for one in own if one.step == version.step]:
        return known[0]
    last = max(((one.number, one.step) for one in own if one.name == version.name), default=None)
    taken = sa.select(model_versions.c.number).where(model_versions.c.name == version.name)
    number = next_number(connection.execute(taken).scalars().all(), last, version.step)
    new = replace(version, number=number, revision=1, created_ns=transaction.now_ns)
    connection.execute(sa.insert(model_versions).values(_MODELS.columns(new)))
    return new


def _find(connection: sa.Connection, name: str, number: int) -> ModelVersion | None:
    return next((one for one in read_models(connection, name) if one.number == number), None)


# --- numbers ------------------------------------------------------------------------------------------------------------


def read_attempts(connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Attempt]:
    columns = [column for column in attempts.c if column.name != "token"]
    query = sa.select(*columns).order_by(attempts.c.rollout_id, attempts.c.attempt)
    return [Attempt(**row._mapping) for row in rows_by_ids(connection, query, attempts.c.rollout_id, rollout_ids)]


def read_workers(connection: sa.Connection, run_id: str | None = None) -> list[WorkerStatus]:
    query = sa.select(workers).order_by(workers.c.seen_ns.desc(), workers.c.id)
    query = only(query, workers.c.run_id, run_id)
    return [WorkerStatus(**row._mapping) for row in connection.execute(query)]


def read_statistics(connection: sa.Connection, now_ns: int, run_id: str | None) -> list[RunStatistics]:
    """Every number comes from an index, so that it costs what the queue is long, whatever else is stored."""
    asked = sa.select(runs.c.id).where(runs.c.state == "running").order_by(runs.c.id)
    if run_id is not None:
        asked = asked.where(runs.c.id == run_id)
    running = connection.execute(asked).scalars().all()
    soon_ns = now_ns + EXPIRING_S * 10**9
    counted = connection.execute(
        sa.select(rollouts.c.run_id, sa.func.count())
        .join_from(attempts, rollouts, attempts.c.rollout_id == rollouts.c.id)
        .where(attempts.c.state == tables.RUNNING, attempts.c.lease_expires_ns <= soon_ns)
        .group_by(rollouts.c.run_id)
    )
    expiring = {row.run_id: row[1] for row in counted}
    return [_statistics(connection, each, now_ns, expiring.get(each, 0)) for each in running]


def _statistics(connection: sa.Connection, run_id: str, now_ns: int, expiring: int) -> RunStatistics:
    def in_state(state: str) -> tuple[int, str | None]:
        query = sa.select(sa.func.count(), sa.func.min(rollouts.c.id))
        count, first = connection.execute(query.where(rollouts.c.run_id == run_id, rollouts.c.state == state)).one()
        return count, first

    queued, first = in_state("queued")
    created_ns = connection.execute(sa.select(rollouts.c.created_ns).where(rollouts.c.id == first)).scalar()
    seen = sa.select(sa.func.count()).where(workers.c.run_id == run_id, workers.c.seen_ns > now_ns - SEEN_S * 10**9)
    return RunStatistics(
        run_id=run_id,
        queued=queued,
        oldest_queued_s=0.0 if created_ns is None else max(0.0, (now_ns - created_ns) / 1e9),
        running=in_state("running")[0],
        expiring=expiring,
        workers=connection.execute(seen).scalar_one(),
    )


# --- the end of data ----------------------------------------------------------------------------------------------------


def drop_records(transaction: SqlTransaction, rollout_ids: Sequence[str]) -> int:
    connection = transaction.connection
    query = sa.select(rollouts.c.id, rollouts.c.state).order_by(rollouts.c.id)
    for row in rows_by_ids(connection, query, rollouts.c.id, rollout_ids):
        if row.state not in FINAL_STATES:
            raise refusal("has_records_to_come", row.id, row.state)
    return sum(_drop(connection, part) for part in codec.chunks(rollout_ids))


def _drop(connection: sa.Connection, rollout_ids: Sequence[str]) -> int:
    """Deletes calls, spans and files, once nobody appends to them; returns how many calls."""
    mine = attempts.c.rollout_id.in_(rollout_ids)
    connection.execute(sa.select(attempts.c.attempt).where(mine).with_for_update()).all()
    named = rewards.c.rollout_id.in_(rollout_ids), rewards.c.call_id.is_not(None)
    connection.execute(sa.update(rewards).where(*named).values(call_id=None))
    for table in (spans, tables.credit):
        connection.execute(sa.delete(table).where(table.c.rollout_id.in_(rollout_ids)))
    drop_files(connection, rollout_ids)
    return connection.execute(sa.delete(calls).where(calls.c.rollout_id.in_(rollout_ids))).rowcount


def delete_portion(transaction: SqlTransaction, run_id: str, first: bool) -> tuple[bool, bool]:
    """Delete some of a run; True if it was there, and True while there is more of it."""
    connection = transaction.connection
    if first and not read_runs(connection, [run_id]):
        return False, False
    query = sa.select(rollouts.c.id).where(rollouts.c.run_id == run_id).order_by(rollouts.c.id).limit(PORTION)
    some = connection.execute(query.with_for_update()).scalars().all()
    if some:
        _drop(connection, some)
        for table in (rewards, consumption, attempts):
            connection.execute(sa.delete(table).where(table.c.rollout_id.in_(some)))
        for table in (rollout_summaries, rollouts):
            connection.execute(sa.delete(table).where(table.c.id.in_(some)))
        return True, True
    old = sa.select(metrics.c.seq).where(metrics.c.run_id == run_id).limit(METRICS_A_PORTION)
    if connection.execute(sa.delete(metrics).where(metrics.c.seq.in_(old))).rowcount:
        return True, True
    if connection.execute(sa.select(runs.c.id).where(runs.c.id == run_id).with_for_update()).first() is None:
        return True, False
    if connection.execute(query).first() is not None:  # enqueued before the run was locked
        return True, True
    left = (metrics, workers, steps, checkpoints, tables.resources, tables.resource_versions, tokens, tables.files)
    for table in left:
        connection.execute(sa.delete(table).where(table.c.run_id == run_id))
    connection.execute(sa.delete(runs).where(runs.c.id == run_id))
    for about in (QUEUED, FINISHED, RESOURCES, METRICS):
        transaction.tell(about, run_id, FOR_EVER)
    return True, False
