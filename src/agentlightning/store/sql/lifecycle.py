"""The life of rollouts in SQL: enqueue, claim, heartbeat, finish, cancel, expire, and sessions.

Methods of the writer: each takes a transaction and a list of arguments, one a caller, and returns one result for each. A
group of callers costs a handful of statements, not a handful each. base.py says what the methods mean, rules.py decides;
this gathers what is known and writes what was decided. Statements that are executed thousands of times are made once.
"""

from __future__ import annotations

import functools
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson
from sqlalchemy import Column, ColumnElement, Connection, bindparam, func, insert, or_, select, tuple_, update

from agentlightning.records import Finish, Lease, Mode, Reward, Rollout, RolloutState, WorkerStatus
from agentlightning.runtime.clock import elapsed_s
from agentlightning.store import codec, rules
from agentlightning.store.base import SESSION_HOLDER, RolloutQuery
from agentlightning.store.rules import refusal
from agentlightning.store.sql import tables
from agentlightning.store.sql.database import Upsert, execute, execute_many, insert_new, upsert_into
from agentlightning.store.sql.record import (
    Rows,
    read_rewards,
    record_rewards,
    require_runs,
    rows_by_ids,
    whose_calls,
)
from agentlightning.store.sql.summaries import add_summaries
from agentlightning.store.sql.tables import (
    attempts,
    calls,
    consumption,
    resource_versions,
    resources,
    rewards,
    rollout_summaries,
    rollouts,
    runs,
    spans,
    workers,
)
from agentlightning.store.sql.writer import SqlTransaction
from agentlightning.store.waiting import FINISHED, QUEUED

if TYPE_CHECKING:
    from sqlalchemy import Row

    AnyRow = Row[*tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    worker: WorkerStatus
    limit: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class Beat:
    worker: WorkerStatus
    leases: Sequence[Lease]
    lease_s: float


@dataclass(frozen=True, slots=True)
class SessionRequest:
    session: Rollout
    """Its state where it begins: queued, with its id and the replica 0."""
    token: str
    lease_s: float


def enqueue(transaction: SqlTransaction, batches: Sequence[Sequence[dict[str, Any]]]) -> list[list[Rollout]]:
    """Columns of new rollouts; the rollouts that then exist, in the order given."""
    new = [row for batch in batches for row in batch]
    require_runs(transaction.connection, {row["run_id"] for row in new})
    _require_templates(transaction.connection, new)
    execute_many(transaction.connection, _enqueue(transaction.connection.dialect.name), new)
    found: dict[tuple[str, str, int], Rollout] = {}
    groups: dict[str, set[str]] = defaultdict(set)
    for row in new:
        groups[row["run_id"]].add(row["group_id"])
    for run_id, group_ids in groups.items():
        query = ROLLOUT.where(rollouts.c.run_id == run_id)
        for row in rows_by_ids(transaction.connection, query, rollouts.c.group_id, group_ids):
            rollout = codec.ROLLOUTS.of_row(row)
            found[run_id, rollout.group_id, rollout.replica] = rollout
        transaction.tell(QUEUED, run_id)
    return [[found[row["run_id"], row["group_id"], row["replica"]] for row in batch] for batch in batches]


def claim(transaction: SqlTransaction, requests: Sequence[ClaimRequest]) -> list[list[tuple[Rollout, Lease]]]:
    """Returns each caller's rollouts: earlier callers first, higher priorities first."""
    _see(transaction, [request.worker for request in requests], _CLAIM)
    by_run: dict[str, list[ClaimRequest]] = defaultdict(list)
    for request in requests:
        by_run[request.worker.run_id].append(request)
    taken: dict[int, list[tuple[Rollout, Lease]]] = {}
    started: list[dict[str, Any]] = []
    for run_id, group in by_run.items():
        wanted = {"run": run_id, "now": transaction.now_ns, "most": sum(request.limit for request in group)}
        found = [codec.ROLLOUTS.of_row(row) for row in execute(transaction.connection, _TAKE, wanted)]
        found = _pin_templates(transaction.connection, run_id, found)
        found.sort(key=lambda rollout: (-rollout.priority, rollout.id))
        for request in group:
            mine, found = found[: request.limit], found[request.limit :]
            expires_ns = transaction.now_ns + int(request.lease_s * 1e9)
            leases = [Lease(rollout_id=one.id, attempt=one.attempt, token=secrets.token_hex(12)) for one in mine]
            started += [_attempt(lease, request.worker.id, transaction.now_ns, expires_ns) for lease in leases]
            taken[id(request)] = list(zip(mine, leases, strict=True))
    execute_many(transaction.connection, _START_ATTEMPT, started)
    return [taken[id(request)] for request in requests]


def heartbeat(transaction: SqlTransaction, beats: Sequence[Beat]) -> list[list[bool]]:
    _see(transaction, [beat.worker for beat in beats], _BEAT)
    running = _running(transaction.connection, {lease.rollout_id for beat in beats for lease in beat.leases})
    answers = []
    for beat in beats:
        answer = [_holds(running, lease) for lease in beat.leases]
        held = [lease.rollout_id for lease, holds in zip(beat.leases, answer, strict=True) if holds]
        if held:  # in one statement: a worker may hold a thousand, and calls wait meanwhile
            expires = transaction.now_ns + int(beat.lease_s * 1e9)
            execute(transaction.connection, _EXTEND_LEASES, {"ids": held, "expires": expires})
        answers.append(answer)
    return answers


def finish(transaction: SqlTransaction, batches: Sequence[Sequence[Finish]]) -> list[list[bool]]:
    finishes = [finish for batch in batches for finish in batch]
    running = _running(transaction.connection, {finish.lease.rollout_id for finish in finishes})
    named = {reward.call_id for finish in finishes for reward in finish.rewards if reward.call_id is not None}
    known = whose_calls(transaction.connection, named)
    brought: list[Reward] = []
    ended: list[tuple[rules.LiveRollout, rules.Ending]] = []
    answers = []
    for finish in finishes:
        holds = _holds(running, finish.lease)
        answers.append(holds)
        if holds:
            rollout = running.pop(finish.lease.rollout_id)
            kept, ending = rules.last_rewards(rollout, finish, transaction.now_ns, known)
            brought += kept
            ended.append((rollout, ending))
    insert_new(transaction.connection, rewards, [codec.REWARDS.row(reward) for reward in brought])
    _end(transaction, ended, look=True)
    in_order = iter(answers)
    return [[next(in_order) for _ in batch] for batch in batches]


def cancel(transaction: SqlTransaction, rollout_ids: Sequence[str]) -> int:
    found = [_live(row) for row in execute(transaction.connection, _LIVE, {"ids": sorted(rollout_ids)})]
    _end(transaction, [(rollout, rules.cancelled()) for rollout in found])
    return len(found)


def expire(transaction: SqlTransaction, deadlines: Sequence[float]) -> list[int]:
    """End what ran out; the first caller gets the count. `deadlines` are by `clock.elapsed_s`."""
    if elapsed_s() > min(deadlines):
        return [0] * len(deadlines)
    found = [_live(row) for row in execute(transaction.connection, _OVERDUE, {"now": transaction.now_ns})]
    ended = [(rollout, rules.overdue(rollout)) for rollout in found]
    _end(transaction, [one for one in ended if one[1].state == "succeeded"], look=True)
    _end(transaction, [one for one in ended if one[1].state != "succeeded"])
    return [len(found)] + [0] * (len(deadlines) - 1)


# --- sessions ---------------------------------------------------------------------------------------------------------


def open_sessions(transaction: SqlTransaction, requests: Sequence[SessionRequest]) -> list[Rollout]:
    require_runs(transaction.connection, {request.session.run_id for request in requests})
    return [_open_session(transaction, request) for request in requests]  # in turn: two of them may be of one session


def record_feedback(transaction: SqlTransaction, batches: Sequence[Rows]) -> list[None]:
    new = [row for batch in batches for row in batch]
    connection = transaction.connection
    whose, run = codec.REWARDS.names.index("rollout_id"), codec.REWARDS.names.index("run_id")
    query = select(rollouts.c.id, rollouts.c.run_id, rollouts.c.state, rollouts.c.attempt, rollouts.c.kind)
    found = {row.id: row for row in rows_by_ids(connection, query, rollouts.c.id, [row[whose] for row in new])}
    for row in new:
        known = found.get(row[whose])
        if known is None or known.run_id != row[run] or known.kind != "session":
            raise refusal("no_session", row[whose], row[run])
    record_rewards(transaction, [new])
    for row in found.values():
        if row.state == "succeeded":  # of others it is settled when they end
            recorded = [reward for reward in read_rewards(connection, [row.id]) if reward.attempt == row.attempt]
            settled = {"reward": rules.final_reward(recorded)}
            for table in (rollouts, rollout_summaries):
                connection.execute(update(table).where(table.c.id == row.id).values(settled))
    return [None] * len(batches)


def _open_session(transaction: SqlTransaction, request: SessionRequest) -> Rollout:
    connection, session = transaction.connection, request.session
    expires_ns = transaction.now_ns + int(request.lease_s * 1e9)
    of_group = rollouts.c.run_id == session.run_id, rollouts.c.group_id == session.group_id
    row = connection.execute(ROLLOUT.where(*of_group).order_by(rollouts.c.replica.desc()).limit(1)).first()
    last = None if row is None else codec.ROLLOUTS.of_row(row)
    if last is not None and last.state == "running":
        execute(connection, _EXTEND_LEASES, {"ids": [last.id], "expires": expires_ns})
        return last
    replica = 0 if last is None else last.replica + 1
    begun = replace(session, replica=replica, state="running", attempt=1, started_ns=transaction.now_ns)
    columns = codec.ROLLOUTS.columns(begun)
    _require_templates(connection, [columns])
    execute_many(connection, _enqueue(connection.dialect.name), [columns])
    [begun] = _pin_templates(connection, session.run_id, [begun])
    lease = Lease(rollout_id=begun.id, attempt=1, token=request.token)
    execute_many(connection, _START_ATTEMPT, [_attempt(lease, SESSION_HOLDER, transaction.now_ns, expires_ns)])
    return begun


# --- reading ----------------------------------------------------------------------------------------------------------


def read_rollouts(connection: Connection, query: RolloutQuery) -> list[Rollout]:
    chosen, given = ROLLOUT, {"run_id": query.run_id, "mode": query.mode, "step": query.step}
    for name, value in given.items():
        if value is not None:
            chosen = chosen.where(rollouts.c[name] == value)
    for name, values in {"state": query.states, "group_id": query.group_ids}.items():
        if values is not None:
            chosen = chosen.where(rollouts.c[name].in_(values))
    if query.unconsumed:
        chosen = chosen.where(consumption.c.outcome.is_(None))
    if query.after is not None:
        chosen = chosen.where(rollouts.c.id > query.after)
    chosen = chosen.order_by(rollouts.c.id.desc() if query.newest_first else rollouts.c.id).limit(query.limit)
    parts = [None] if query.ids is None else list(codec.chunks(query.ids))
    found: list[Rollout] = []
    for part in reversed(parts) if query.newest_first else parts:
        of_part = chosen if part is None else chosen.where(rollouts.c.id.in_(part))
        found += [codec.ROLLOUTS.of_row(row) for row in connection.execute(of_part)]
    return found[: query.limit]


def read_counts(connection: Connection, run_id: str) -> dict[tuple[Mode, RolloutState], int]:
    query = select(rollouts.c.mode, rollouts.c.state, func.count()).where(rollouts.c.run_id == run_id)
    found = connection.execute(query.group_by(rollouts.c.mode, rollouts.c.state))
    return {(mode, state): count for mode, state, count in found}


def read_last_finished(connection: Connection, run_id: str) -> int:
    """Returns the number of finished rollouts of the run."""
    last = connection.execute(select(runs.c.finished).where(runs.c.id == run_id)).scalar()
    if last is None:
        raise refusal("no_run", run_id)
    return int(last)


def read_finished(connection: Connection, run_id: str, after: int, limit: int) -> list[Rollout]:
    require_runs(connection, {run_id})
    query = ROLLOUT.where(rollouts.c.run_id == run_id, rollouts.c.finished_seq > after)
    return [
        codec.ROLLOUTS.of_row(row) for row in connection.execute(query.order_by(rollouts.c.finished_seq).limit(limit))
    ]


# --- statements -------------------------------------------------------------------------------------------------------


def _among(column: Column[str]) -> ColumnElement[bool]:
    """The column is one of `ids`."""
    return column.in_(bindparam("ids", expanding=True))


_OUTCOMES = rollouts.outerjoin(consumption, consumption.c.rollout_id == rollouts.c.id)
ROLLOUT = select(*rollouts.c, consumption.c.outcome).select_from(_OUTCOMES)
"""Rollouts with their outcomes, as rows of `codec.ROLLOUTS`."""

# run
_WORKERS = select(workers.c.id, workers.c.host, workers.c.pid).where(
    workers.c.run_id == bindparam("run"), _among(workers.c.id)
)
# run, most
_NEXT = (
    select(rollouts.c.id)
    .where(rollouts.c.run_id == bindparam("run"), rollouts.c.state == "queued")
    .order_by(rollouts.c.priority.desc(), rollouts.c.id)
    .limit(bindparam("most"))
    .cte("next")  # read once, whatever the plan: a subquery may be read again, and take more than it was asked for
)
# run, most, now
_TAKE = (
    update(rollouts)
    .where(rollouts.c.id.in_(select(_NEXT.c.id)))
    .values(
        state="running",
        attempt=rollouts.c.attempt + 1,
        started_ns=func.coalesce(rollouts.c.started_ns, bindparam("now")),
    )
    .returning(*rollouts.c)
)
_ROLLOUT_COLUMNS = tuple(rollouts.c[name] for name in ("id", "run_id", "kind", "state", "attempt", "lost", "retry"))
_LIVE = select(*_ROLLOUT_COLUMNS).where(
    _among(rollouts.c.id), or_(rollouts.c.state == "queued", rollouts.c.state == "running")
)
_ALL_RUNNING = (
    select(*_ROLLOUT_COLUMNS, attempts.c.token, attempts.c.worker_id)
    .join_from(attempts, rollouts, attempts.c.rollout_id == rollouts.c.id)
    .where(attempts.c.state == tables.RUNNING)
)
_RUNNING = _ALL_RUNNING.where(_among(attempts.c.rollout_id))
# now
_OVERDUE = _ALL_RUNNING.where(attempts.c.lease_expires_ns <= bindparam("now"))
# run, worker
_HELD = _ALL_RUNNING.where(attempts.c.worker_id == bindparam("worker"), rollouts.c.run_id == bindparam("run"))
# run
_NEWEST_TEMPLATES = (
    select(resources.c.name, resources.c.version)
    .select_from(resource_versions)
    .join(resources, tables.IS_NEWEST)
    .where(resource_versions.c.run_id == bindparam("run"), resources.c.kind == "prompt_template")
)
_START_ATTEMPT = insert(attempts)
# ids, expires. A rollout has one running attempt at most.
_EXTEND_LEASES = (
    update(attempts)
    .where(_among(attempts.c.rollout_id), attempts.c.state == tables.RUNNING)
    .values(lease_expires_ns=bindparam("expires"))
)
# The columns that these two set are those that their parameters name, beside rollout and number.
_UPDATE_ATTEMPT = update(attempts).where(
    attempts.c.rollout_id == bindparam("rollout"), attempts.c.attempt == bindparam("number")
)
_UPDATE_ROLLOUT = update(rollouts).where(rollouts.c.id == bindparam("rollout"))
# run, more
_COUNT_FINISHED = (
    update(runs)
    .where(runs.c.id == bindparam("run"))
    .values(finished=runs.c.finished + bindparam("more"))
    .returning(runs.c.finished)
)
_CALLS = (
    select(
        calls.c.rollout_id, calls.c.attempt, func.count().label("calls"), func.max(calls.c.finished_ns).label("last")
    )
    .where(_among(calls.c.rollout_id))
    .group_by(calls.c.rollout_id, calls.c.attempt)
)
_EVENTS = (
    select(spans.c.rollout_id, spans.c.attempt, spans.c.name, spans.c.attributes, spans.c.started_ns)
    .where(tables.OF_GATEWAY, _among(spans.c.rollout_id))
    .order_by(spans.c.started_ns)
)
_REWARDS = select(rewards).where(_among(rewards.c.rollout_id)).order_by(rewards.c.created_ns, rewards.c.seq)


@functools.cache
def _see_workers(dialect: str, changing: tuple[str, ...]) -> Upsert:
    """Insert workers, or change these columns of those that are known."""
    statement = upsert_into(dialect, workers)
    changes = {name: statement.excluded[name] for name in changing}
    return statement.on_conflict_do_update(index_elements=["run_id", "id"], set_=changes)


@functools.cache
def _enqueue(dialect: str) -> Upsert:
    """Insert rollouts, except for those whose place is taken."""
    place = ["run_id", "group_id", "replica"]
    return upsert_into(dialect, rollouts).on_conflict_do_nothing(index_elements=place)


# --- beginnings -------------------------------------------------------------------------------------------------------

_BEAT = ("running", "seen_ns", "paused")
_CLAIM = ("host", "pid", *_BEAT)
"""Columns of a worker that change: only a claim says who it is, so that a beat never hides a predecessor from it."""


def _see(transaction: SqlTransaction, seen: Iterable[WorkerStatus], changing: tuple[str, ...]) -> None:
    """Records that workers claim or beat. One restarted under its name on its host loses its predecessor's leases."""
    connection = transaction.connection
    latest = {(worker.run_id, worker.id): worker for worker in seen}
    ids = [worker_id for _, worker_id in latest]
    known = {
        (run_id, row.id): row
        for run_id in {run_id for run_id, _ in latest}
        for row in execute(connection, _WORKERS, {"run": run_id, "ids": ids})
    }
    if new := {run_id for run_id, worker_id in latest if (run_id, worker_id) not in known}:
        require_runs(connection, new)
    for key, worker in latest.items():
        before = known.get(key)
        if changing is _CLAIM and before is not None and rules.is_successor(worker, before.host, before.pid):
            held = execute(connection, _HELD, {"run": worker.run_id, "worker": worker.id})
            _end(transaction, [(_live(row), rules.restarted(worker.id)) for row in held])
    columns = [{**asdict(worker), "seen_ns": transaction.now_ns} for worker in latest.values()]
    execute_many(connection, _see_workers(connection.dialect.name, changing), columns)


def _attempt(lease: Lease, worker_id: str, now_ns: int, expires_ns: int) -> dict[str, Any]:
    return {
        "rollout_id": lease.rollout_id,
        "attempt": lease.attempt,
        "state": "running",
        "worker_id": worker_id,
        "token": lease.token,
        "lease_expires_ns": expires_ns,
        "started_ns": now_ns,
    }


def _require_templates(connection: Connection, new: Sequence[dict[str, Any]]) -> None:
    """NotFoundError where the columns of a new rollout name a template, or a version of one, that its run does not have."""
    named: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for row in new:
        if row["prompts"] != "{}":
            named[row["run_id"]].update(orjson.loads(row["prompts"]).items())
    for run_id, pins in named.items():
        of_run = resources.c.run_id == run_id, resources.c.kind == "prompt_template"
        query = select(resources.c.name, resources.c.version)
        query = query.where(*of_run, tuple_(resources.c.name, resources.c.version).in_(sorted(pins)))
        if missing := sorted(pins - {tuple(row) for row in connection.execute(query)}):
            raise refusal("no_template", run_id, *missing[0])


def _pin_templates(connection: Connection, run_id: str, claimed: Sequence[Rollout]) -> list[Rollout]:
    first = any(rollout.attempt == 1 for rollout in claimed)
    newest = dict(execute(connection, _NEWEST_TEMPLATES, {"run": run_id})) if first else {}
    kept = [rules.pinned(rollout, newest) for rollout in claimed]
    changed = [
        {"rollout": after.id, "prompts": codec.dump(after.prompts, "prompts")}
        for before, after in zip(claimed, kept, strict=True)
        if after is not before
    ]
    execute_many(connection, _UPDATE_ROLLOUT, changed)
    return kept


# --- ends -------------------------------------------------------------------------------------------------------------


def _live(row: AnyRow) -> rules.LiveRollout:
    return rules.LiveRollout(**{**row._asdict(), "retry": codec.read_retry(row.retry)})


def _running(connection: Connection, rollout_ids: Collection[str]) -> dict[str, rules.LiveRollout]:
    """Each of these rollouts that has a running attempt."""
    return {row.id: _live(row) for row in execute(connection, _RUNNING, {"ids": list(rollout_ids)})}


def _holds(running: dict[str, rules.LiveRollout], lease: Lease) -> bool:
    rollout = running.get(lease.rollout_id)
    return rollout is not None and rollout.held_by(lease)


def _look(connection: Connection, ended: Iterable[rules.LiveRollout]) -> dict[tuple[str, int], rules.AttemptRecord]:
    """Reads the record of attempts that a worker, or silence after a session, ended."""
    ids = {"ids": [rollout.id for rollout in ended]}
    found: defaultdict[tuple[str, int], rules.AttemptRecord] = defaultdict(rules.AttemptRecord)
    for row in execute(connection, _REWARDS, ids):
        found[row.rollout_id, row.attempt].rewards.append(codec.REWARDS.of_row(row))
    for row in execute(connection, _CALLS, ids):
        one = found[row.rollout_id, row.attempt]
        one.calls, one.last_call_ns = row.calls, row.last
    for row in execute(connection, _EVENTS, ids):
        attributes = orjson.loads(row.attributes)
        found[row.rollout_id, row.attempt].add_event(row.name, row.started_ns, attributes)
    return found


def _end(
    transaction: SqlTransaction, ended: Sequence[tuple[rules.LiveRollout, rules.Ending]], *, look: bool = False
) -> None:
    """Ends attempts by the rules; rollouts that are then finished get their places in the order of their run. look: what the
    record has of the attempts counts."""
    if not ended:
        return
    found = _look(transaction.connection, [rollout for rollout, _ in ended]) if look else {}
    changes = []
    for rollout, ending in ended:
        evidence = found.get((rollout.id, rollout.attempt), rules.AttemptRecord()) if look else None
        changes.append((rollout, rules.end_attempt(rollout, ending, evidence)))
    places = _places(transaction, changes)
    now_ns = transaction.now_ns
    end_attempts, end_rollouts = [], []
    for rollout, change in changes:
        error = codec.text(change.error)
        if change.ran:
            what = {"rollout": rollout.id, "number": rollout.attempt, "state": change.attempt_state}
            what["cause"] = change.cause
            end_attempts.append({**what, "finished_ns": now_ns, "error": error, "output": codec.text(change.output)})
        if change.state == "queued":
            transaction.tell(QUEUED, rollout.run_id)
        place = places.get(rollout.id)
        kept = {
            name: getattr(change, name) for name in ("state", "lost", "reward", "calls", "refused", "gave_up", "cause")
        }
        finished = {"finished_ns": None if place is None else now_ns, "finished_seq": place}
        warning = codec.text(change.warning)
        end_rollouts.append({"rollout": rollout.id, **kept, **finished, "error": error, "warning": warning})
    execute_many(transaction.connection, _UPDATE_ATTEMPT, end_attempts)
    execute_many(transaction.connection, _UPDATE_ROLLOUT, end_rollouts)
    add_summaries(transaction.connection, list(places))


def _places(
    transaction: SqlTransaction, changes: Sequence[tuple[rules.LiveRollout, rules.EndChange]]
) -> dict[str, int]:
    by_run: dict[str, list[str]] = defaultdict(list)
    for rollout, change in changes:
        if change.state != "queued":
            by_run[rollout.run_id].append(rollout.id)
    places: dict[str, int] = {}
    for run_id, ids in by_run.items():
        [(last,)] = execute(transaction.connection, _COUNT_FINISHED, {"run": run_id, "more": len(ids)})
        places.update(zip(ids, range(last - len(ids) + 1, last + 1), strict=True))
        transaction.tell(FINISHED, run_id, last)
    return places
