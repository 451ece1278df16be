"""The history of runs in SQL: runs, their training steps with what each consumed, their checkpoints.

Verbs of the writer take a transaction and a list of arguments, one a caller; functions that read take a connection.
base.py says what they mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from agentlightning.store import codec
from agentlightning.store.run_ids import run_ids
from agentlightning.store.sentences import refusal
from agentlightning.store.sql.lifecycle import require_runs
from agentlightning.store.sql.tables import checkpoints, consumption, metrics, rollouts, runs, steps
from agentlightning.store.sql.upsert import upsert
from agentlightning.store.sql.writer import Transaction
from agentlightning.types import FINAL_STATES, JSON, Checkpoint, Consumed, Run, RunState, Step


@dataclass(frozen=True, slots=True)
class NewRun:
    name: str
    config: str
    run_id: str | None


@dataclass(frozen=True, slots=True)
class RunChange:
    run_id: str
    state: RunState | None
    summary: JSON | None


@dataclass(frozen=True, slots=True)
class Opening:
    run_id: str
    step: int
    consumed: Sequence[Consumed]


@dataclass(frozen=True, slots=True)
class Closing:
    run_id: str
    step: int
    version: int


@dataclass(frozen=True, slots=True)
class Reopening:
    run_id: str
    after: int


def create_run(transaction: Transaction, requests: Sequence[NewRun]) -> list[Run]:
    return [_create(transaction, request) for request in requests]


def update_run(transaction: Transaction, changes: Sequence[RunChange]) -> list[Run]:
    return [_change(transaction, change) for change in changes]


def open_step(transaction: Transaction, openings: Sequence[Opening]) -> list[Step]:
    return [_open(transaction, opening) for opening in openings]


def close_step(transaction: Transaction, closings: Sequence[Closing]) -> list[Step]:
    return [_close(transaction, closing) for closing in closings]


def reopen_steps(transaction: Transaction, requests: Sequence[Reopening]) -> list[list[Step]]:
    return [_reopen(transaction, request) for request in requests]


def put_checkpoint(transaction: Transaction, new: Sequence[Checkpoint]) -> list[None]:
    require_runs(transaction.connection, {checkpoint.run_id for checkpoint in new})
    statement = upsert(transaction.connection, checkpoints)
    changes = {name: statement.excluded[name] for name in ("path", "version", "created_ns")}
    transaction.connection.execute(
        statement.on_conflict_do_update(index_elements=["run_id", "step"], set_=changes),
        [
            {
                "run_id": checkpoint.run_id,
                "step": checkpoint.step,
                "path": checkpoint.path,
                "version": checkpoint.version,
                "created_ns": checkpoint.created_ns or transaction.now_ns,
            }
            for checkpoint in new
        ],
    )
    return [None] * len(new)


def read_runs(connection: Connection, ids: Sequence[str] | None, limit: int | None) -> list[Run]:
    query = select(runs).order_by(runs.c.created_ns.desc(), runs.c.id.desc()).limit(limit)
    if ids is not None:
        query = query.where(runs.c.id.in_(ids))
    return [codec.RUNS.of_row(row) for row in connection.execute(query)]


def read_steps(
    connection: Connection, run_id: str, after: int | None = None, limit: int | None = None, only: int | None = None
) -> list[Step]:
    """Steps in order: all, those later than `after`, or one."""
    query = select(steps).where(steps.c.run_id == run_id).order_by(steps.c.step)
    query = query.limit(limit)
    if after is not None:
        query = query.where(steps.c.step > after)
    if only is not None:
        query = query.where(steps.c.step == only)
    found = connection.execute(query).all()
    consumed = defaultdict(list)
    wanted = select(consumption).where(consumption.c.step_id.in_([row.id for row in found]))
    for row in connection.execute(wanted.order_by(consumption.c.step_id, consumption.c.position)):
        consumed[row.step_id].append(Consumed(rollout_id=row.rollout_id, outcome=row.outcome))
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


def _create(transaction: Transaction, request: NewRun) -> Run:
    now_ns = transaction.now_ns
    run_id = request.run_id or _free_id(transaction.connection, now_ns)
    values: dict[str, Any] = {
        "id": run_id,
        "name": request.name,
        "state": "running",
        "config": request.config,
        "created_ns": now_ns,
        "updated_ns": now_ns,
        "summary": "{}",
    }
    statement = upsert(transaction.connection, runs).on_conflict_do_nothing(index_elements=["id"])
    if transaction.connection.execute(statement.returning(runs.c.id), values).first() is None:
        raise refusal("run_exists", run_id)
    return _run(transaction.connection, run_id)


def _free_id(connection: Connection, now_ns: int) -> str:
    taken = select(runs.c.id)
    return next(each for each in run_ids(now_ns) if connection.execute(taken.where(runs.c.id == each)).first() is None)


def _run(connection: Connection, run_id: str) -> Run:
    row = connection.execute(select(runs).where(runs.c.id == run_id)).first()
    if row is None:
        raise refusal("no_run", run_id)
    return codec.RUNS.of_row(row)


def _change(transaction: Transaction, change: RunChange) -> Run:
    run = _run(transaction.connection, change.run_id)
    values = {
        "state": change.state or run.state,
        "summary": codec.dump({**run.summary, **(change.summary or {})}, "summary"),
        "updated_ns": transaction.now_ns,
    }
    transaction.connection.execute(update(runs).where(runs.c.id == run.id).values(values))
    return _run(transaction.connection, run.id)


def _step(connection: Connection, run_id: str, step: int) -> Step | None:
    return next(iter(read_steps(connection, run_id, only=step)), None)


def _open(transaction: Transaction, opening: Opening) -> Step:
    connection, run_id, step = transaction.connection, opening.run_id, opening.step
    require_runs(connection, {run_id})
    present = _step(connection, run_id, step)
    if present is not None:
        if present.state == "open" and present.consumed == list(opening.consumed):
            return present
        raise refusal(f"step_{present.state}", step, run_id)
    _refuse_unfit(connection, opening)
    values = {"run_id": run_id, "step": step, "state": "open", "created_ns": transaction.now_ns}
    step_id = connection.execute(insert(steps).values(values).returning(steps.c.id)).scalar_one()
    eaten = [
        {
            "rollout_id": consumed.rollout_id,
            "run_id": run_id,
            "mode": "train",
            "step_id": step_id,
            "position": position,
            "outcome": consumed.outcome,
        }
        for position, consumed in enumerate(opening.consumed)
    ]
    if eaten:
        connection.execute(insert(consumption), eaten)
    opened = _step(connection, run_id, step)
    assert opened is not None
    return opened


def _refuse_unfit(connection: Connection, opening: Opening) -> None:
    """Refuses what constraints would refuse without saying why, and what they cannot know: that a rollout is finished."""
    where = opening.step, opening.run_id
    wanted = [consumed.rollout_id for consumed in opening.consumed]
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
        if row.run_id != opening.run_id:
            raise refusal("of_other_run", *where, rollout_id, row.run_id)
        if row.mode != "train":
            raise refusal("is_evaluation", *where, rollout_id)
        if row.state not in FINAL_STATES:
            raise refusal("not_finished", *where, rollout_id, row.state)
        if row.step is not None:
            raise refusal("consumed", *where, rollout_id, row.step)


def _close(transaction: Transaction, closing: Closing) -> Step:
    where = closing.step, closing.run_id
    present = _step(transaction.connection, closing.run_id, closing.step)
    if present is None:
        raise refusal("no_step", *where)
    if present.state == "closed":
        if present.version != closing.version:
            raise refusal("step_closed_otherwise", *where, present.version, closing.version)
        return present
    transaction.connection.execute(
        update(steps)
        .where(steps.c.run_id == closing.run_id, steps.c.step == closing.step, steps.c.state == "open")
        .values(state="closed", version=closing.version)
    )
    closed = _step(transaction.connection, closing.run_id, closing.step)
    assert closed is not None
    return closed


def _reopen(transaction: Transaction, request: Reopening) -> list[Step]:
    require_runs(transaction.connection, {request.run_id})
    later = steps.c.run_id == request.run_id, steps.c.step > request.after, steps.c.state == "closed"
    transaction.connection.execute(update(steps).where(*later).values(state="open", version=None))
    _abandon_metrics(transaction.connection, request)
    return read_steps(transaction.connection, request.run_id, after=request.after)


def _abandon_metrics(connection: Connection, request: Reopening) -> None:
    later = metrics.c.run_id == request.run_id, metrics.c.step > request.after
    connection.execute(update(metrics).where(*later).values(abandoned=True))
