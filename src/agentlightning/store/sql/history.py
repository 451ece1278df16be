"""The history of runs in SQL: runs, their training steps with what each consumed, their checkpoints.

Those that write take a transaction, those that read a connection; base.py says what they mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace

from sqlalchemy import Connection, insert, select, update

from agentlightning.records import FINAL_STATES, JSON, Checkpoint, Consumed, Run, RunState, Step
from agentlightning.store import codec
from agentlightning.store.audit import Actor
from agentlightning.store.run_ids import check_run_id, run_ids
from agentlightning.store.sentences import refusal
from agentlightning.store.sql import statements
from agentlightning.store.sql.access import bind_token, note
from agentlightning.store.sql.lifecycle import require_runs
from agentlightning.store.sql.prepared import execute_many
from agentlightning.store.sql.tables import checkpoints, consumption, metrics, rollouts, runs, steps
from agentlightning.store.sql.upsert import upsert
from agentlightning.store.sql.writer import Transaction


def create_run(transaction: Transaction, actor: Actor, name: str, config: JSON, run_id: str | None = None) -> Run:
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
    transaction: Transaction, actor: Actor, run_id: str, state: RunState | None = None, summary: JSON | None = None
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


def open_step(transaction: Transaction, run_id: str, step: int, consumed: Sequence[Consumed]) -> Step:
    connection = transaction.connection
    require_runs(connection, {run_id})
    present = _step(connection, run_id, step)
    if present is not None:
        if present.state == "open" and present.consumed == list(consumed):
            return present
        raise refusal(f"step_{present.state}", step, run_id)
    _refuse_unfit(connection, run_id, step, [one.rollout_id for one in consumed])
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
        execute_many(connection, statements.SET_OUTCOME, outcomes)
    return opened


def close_step(transaction: Transaction, run_id: str, step: int, version: int) -> Step:
    present = _step(transaction.connection, run_id, step)
    if present is None:
        raise refusal("no_step", step, run_id)
    if present.state == "closed":
        if present.version != version:
            raise refusal("step_closed_otherwise", step, run_id, present.version, version)
        return present
    transaction.connection.execute(
        update(steps)
        .where(steps.c.run_id == run_id, steps.c.step == step, steps.c.state == "open")
        .values(state="closed", version=version)
    )
    return replace(present, state="closed", version=version)


def reopen_steps(transaction: Transaction, run_id: str, after: int) -> list[Step]:
    connection = transaction.connection
    require_runs(connection, {run_id})
    closed = steps.c.run_id == run_id, steps.c.step > after, steps.c.state == "closed"
    connection.execute(update(steps).where(*closed).values(state="open", version=None))
    later = metrics.c.run_id == run_id, metrics.c.step > after
    connection.execute(update(metrics).where(*later).values(abandoned=True))
    return read_steps(connection, run_id, after=after)


def put_checkpoint(transaction: Transaction, checkpoint: Checkpoint) -> None:
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


def _refuse_unfit(connection: Connection, run_id: str, step: int, wanted: Sequence[str]) -> None:
    """Refuses what constraints would refuse without saying why, and what they cannot know: that a rollout is finished."""
    where = step, run_id
    if len(set(wanted)) < len(wanted):
        raise refusal("listed_twice", *where)
    columns = (rollouts.c.id, rollouts.c.run_id, rollouts.c.mode, rollouts.c.state, steps.c.step)
    eaten = rollouts.outerjoin(consumption, consumption.c.rollout_id == rollouts.c.id).outerjoin(
        steps, steps.c.id == consumption.c.step_id
    )
    known = {
        row.id: row
        for part in codec.chunks(wanted)
        for row in connection.execute(select(*columns).select_from(eaten).where(rollouts.c.id.in_(part)))
    }
    for rollout_id in wanted:
        row = known.get(rollout_id)
        if row is None:
            raise refusal("no_rollout", *where, rollout_id)
        if row.run_id != run_id:
            raise refusal("of_other_run", *where, rollout_id, row.run_id)
        if row.mode != "train":
            raise refusal("is_evaluation", *where, rollout_id)
        if row.state not in FINAL_STATES:
            raise refusal("not_finished", *where, rollout_id, row.state)
        if row.step is not None:
            raise refusal("consumed", *where, rollout_id, row.step)
