"""The life of rollouts in SQL: enqueue, claim, heartbeat, finish, cancel, expire.

Methods of the writer: each takes a transaction and a list of arguments, one a caller, and returns one result for each. A
group of callers costs a handful of statements, not a handful each. base.py says what the methods mean.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson
from sqlalchemy import Connection, func, select

from agentlightning.errors import RewardError
from agentlightning.records import (
    SESSION,
    AttemptEnd,
    Finish,
    Lease,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    WorkerStatus,
)
from agentlightning.runtime.clock import elapsed_s
from agentlightning.store import codec
from agentlightning.store.base import RolloutQuery, final_reward, reward_number
from agentlightning.store.gateway_events import (
    IGNORED_BASE_URL,
    NO_CALLS,
    OUTGROWN,
    broken_counts,
    broken_warning,
    refused_counts,
    refused_warning,
)
from agentlightning.store.notifier import FINISHED, QUEUED
from agentlightning.store.sentences import reason, refusal
from agentlightning.store.sql import statements
from agentlightning.store.sql.prepared import execute, execute_many
from agentlightning.store.sql.prompts import pin_templates, require_templates
from agentlightning.store.sql.summaries import add_summaries
from agentlightning.store.sql.tables import (
    consumption,
    rewards,
    rollouts,
    runs,
)
from agentlightning.store.sql.writer import Transaction

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


def enqueue(transaction: Transaction, batches: Sequence[Sequence[dict[str, Any]]]) -> list[list[Rollout]]:
    """Columns of new rollouts; the rollouts that then exist, in the order given."""
    new = [row for batch in batches for row in batch]
    require_runs(transaction.connection, {row["run_id"] for row in new})
    require_templates(transaction.connection, new)
    if new:
        execute_many(transaction.connection, statements.enqueue_rollouts(transaction.connection.dialect.name), new)
    found: dict[tuple[str, str, int], Rollout] = {}
    groups: dict[str, set[str]] = defaultdict(set)
    for row in new:
        groups[row["run_id"]].add(row["group_id"])
    for run_id, group_ids in groups.items():
        for part in codec.chunks(group_ids):
            query = statements.ROLLOUT.where(rollouts.c.run_id == run_id, rollouts.c.group_id.in_(part))
            for rollout in map(codec.ROLLOUTS.of_row, transaction.connection.execute(query)):
                found[run_id, rollout.group_id, rollout.replica] = rollout
        transaction.tell(QUEUED, run_id)
    return [[found[row["run_id"], row["group_id"], row["replica"]] for row in batch] for batch in batches]


def claim(transaction: Transaction, requests: Sequence[ClaimRequest]) -> list[list[tuple[Rollout, Lease]]]:
    """Returns each caller's rollouts: earlier callers first, higher priorities first."""
    _see(transaction, [request.worker for request in requests], _CLAIM)
    by_run: dict[str, list[ClaimRequest]] = defaultdict(list)
    for request in requests:
        by_run[request.worker.run_id].append(request)
    taken: dict[int, list[tuple[Rollout, Lease]]] = {}
    started: list[dict[str, Any]] = []
    for run_id, group in by_run.items():
        wanted = {"run": run_id, "now": transaction.now_ns, "most": sum(request.limit for request in group)}
        found = [codec.ROLLOUTS.of_row(row) for row in execute(transaction.connection, statements.TAKE, wanted)]
        found = pin_templates(transaction.connection, run_id, found)
        found.sort(key=lambda rollout: (-rollout.priority, rollout.id))
        for request in group:
            mine, found = found[: request.limit], found[request.limit :]
            taken[id(request)] = [_lease(transaction, request, rollout, started) for rollout in mine]
    if started:
        execute_many(transaction.connection, statements.START_ATTEMPT, started)
    return [taken[id(request)] for request in requests]


def heartbeat(transaction: Transaction, beats: Sequence[Beat]) -> list[list[bool]]:
    _see(transaction, [beat.worker for beat in beats], _BEAT)
    running = _running(transaction.connection, {lease.rollout_id for beat in beats for lease in beat.leases})
    answers = []
    for beat in beats:
        answer = [_holds(running, lease) for lease in beat.leases]
        held = [lease.rollout_id for lease, holds in zip(beat.leases, answer, strict=True) if holds]
        if held:  # in one statement: a worker may hold a thousand, and calls wait meanwhile
            expires = transaction.now_ns + int(beat.lease_s * 1e9)
            execute(transaction.connection, statements.EXTEND_LEASES, {"ids": held, "expires": expires})
        answers.append(answer)
    return answers


def finish(transaction: Transaction, batches: Sequence[Sequence[Finish]]) -> list[list[bool]]:
    finishes = [finish for batch in batches for finish in batch]
    running = _running(transaction.connection, {finish.lease.rollout_id for finish in finishes})
    ended: list[_End] = []
    answers = []
    for finish in finishes:
        holds = _holds(running, finish.lease)
        answers.append(holds)
        if holds:
            row = running.pop(finish.lease.rollout_id)
            ended.append(_End(row, finish.state, finish.error, finish.output, finish))
    _record_last_rewards(transaction, ended)
    _settle(transaction.connection, ended)
    _end(transaction, ended)
    in_order = iter(answers)
    return [[next(in_order) for _ in batch] for batch in batches]


def cancel(transaction: Transaction, rollout_ids: Sequence[str]) -> dict[str, list[str]]:
    """Returns the rollouts that were cancelled, by run."""
    found = execute(transaction.connection, statements.LIVE, {"ids": sorted(rollout_ids)})
    _end(transaction, [_End(row, "lost", reason("cancelled"), None) for row in found], cancelled=True)
    by_run: dict[str, list[str]] = defaultdict(list)
    for row in found:
        by_run[row.run_id].append(row.id)
    return by_run


def expire(transaction: Transaction, deadlines: Sequence[float]) -> list[int]:
    """End what ran out, as lost unless it is a session; the first caller gets the count. `deadlines` are by
    `clock.elapsed_s`."""
    if elapsed_s() > min(deadlines):
        return [0] * len(deadlines)
    found = execute(transaction.connection, statements.OVERDUE, {"now": transaction.now_ns})
    sessions = [_End(row, "succeeded", None, None) for row in found if row.group_id.startswith(SESSION)]
    _settle(transaction.connection, sessions)
    others = [row for row in found if not row.group_id.startswith(SESSION)]
    lost = [_End(row, "lost", reason("silent_worker", row.worker_id), None) for row in others]
    _end(transaction, sessions + lost)
    return [len(found)] + [0] * (len(deadlines) - 1)


def read_rollouts(connection: Connection, query: RolloutQuery) -> list[Rollout]:
    chosen = statements.ROLLOUT
    for column, value in (
        (rollouts.c.run_id, query.run_id),
        (rollouts.c.mode, query.mode),
        (rollouts.c.step, query.step),
    ):
        if value is not None:
            chosen = chosen.where(column == value)
    for column, values in ((rollouts.c.state, query.states), (rollouts.c.group_id, query.group_ids)):
        if values is not None:
            chosen = chosen.where(column.in_(values))
    if query.unconsumed:
        chosen = chosen.where(consumption.c.outcome.is_(None))
    if query.after is not None:
        chosen = chosen.where(rollouts.c.id > query.after)
    chosen = chosen.order_by(rollouts.c.id.desc() if query.newest_first else rollouts.c.id).limit(query.limit)
    if query.ids is None:
        return [codec.ROLLOUTS.of_row(row) for row in connection.execute(chosen)]
    parts = list(codec.chunks(query.ids))
    if query.newest_first:
        parts.reverse()
    found = [
        codec.ROLLOUTS.of_row(row)
        for part in parts
        for row in connection.execute(chosen.where(rollouts.c.id.in_(part)))
    ]
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
    query = statements.ROLLOUT.where(rollouts.c.run_id == run_id, rollouts.c.finished_seq > after)
    return [
        codec.ROLLOUTS.of_row(row) for row in connection.execute(query.order_by(rollouts.c.finished_seq).limit(limit))
    ]


def require_runs(connection: Connection, run_ids: Collection[str]) -> None:
    """NotFoundError that names the runs which do not exist."""
    found = {row.id for row in execute(connection, statements.RUNS, {"ids": list(run_ids)})}
    if missing := sorted(set(run_ids) - found):
        raise refusal("no_run", ", ".join(missing))


@dataclass(slots=True)
class _End:
    """An attempt that ends, and what is then known of it."""

    row: AnyRow
    state: AttemptEnd
    error: str | None
    output: str | None
    finish: Finish | None = None
    reward: float | None = None
    calls: int = 0
    warning: str | None = None
    refused: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.row.id, self.row.attempt

    def next_state(self) -> RolloutState:
        """By the retry policy. Every attempt that ended and was not lost used one of max_attempts."""
        if self.state == "succeeded":
            return "succeeded"
        retry = codec.read_retry(self.row.retry)
        if self.state == "lost":
            return "queued" if self.row.lost + 1 < retry.max_lost else "failed"
        if self.refused:  # the same program would be refused again
            return "failed"
        used = self.row.attempt - self.row.lost
        return "queued" if self.state in retry.retry_on and used < retry.max_attempts else "failed"


_BEAT = ("running", "seen_ns")
_CLAIM = ("host", "pid", *_BEAT)
"""Columns of a worker that change: only a claim says who it is, so that a beat never hides a predecessor from it."""


def _see(transaction: Transaction, seen: Iterable[WorkerStatus], changing: tuple[str, ...]) -> None:
    """Workers claim or beat. One that starts again under its name on its host holds nothing of what its predecessor held."""
    connection = transaction.connection
    latest = {(worker.run_id, worker.id): worker for worker in seen}
    run_ids = {run_id for run_id, _ in latest}
    ids = [worker_id for _, worker_id in latest]
    known = {
        (run_id, row.id): row
        for run_id in run_ids
        for row in execute(connection, statements.WORKERS, {"run": run_id, "ids": ids})
    }
    if new := {run_id for run_id, worker_id in latest if (run_id, worker_id) not in known}:
        require_runs(connection, new)
    for key, worker in latest.items():
        before = known.get(key)
        if changing is _CLAIM and before is not None and before.host == worker.host and before.pid != worker.pid:
            held = execute(connection, statements.HELD, {"run": worker.run_id, "worker": worker.id})
            why = reason("restarted_worker", worker.id)
            _end(transaction, [_End(row, "lost", why, None) for row in held])
    execute_many(
        connection,
        statements.see_workers(connection.dialect.name, changing),
        [
            {
                "id": worker.id,
                "run_id": worker.run_id,
                "host": worker.host,
                "pid": worker.pid,
                "running": worker.running,
                "seen_ns": transaction.now_ns,
            }
            for worker in latest.values()
        ],
    )


def _lease(
    transaction: Transaction, request: ClaimRequest, rollout: Rollout, started: list[dict[str, Any]]
) -> tuple[Rollout, Lease]:
    lease = Lease(rollout_id=rollout.id, attempt=rollout.attempt, token=secrets.token_hex(12))
    started.append(
        {
            "rollout_id": rollout.id,
            "attempt": rollout.attempt,
            "state": "running",
            "worker_id": request.worker.id,
            "token": lease.token,
            "lease_expires_ns": transaction.now_ns + int(request.lease_s * 1e9),
            "started_ns": transaction.now_ns,
        }
    )
    return rollout, lease


def _running(connection: Connection, rollout_ids: Collection[str]) -> dict[str, AnyRow]:
    """The running attempt of each rollout that has one."""
    return {row.id: row for row in execute(connection, statements.RUNNING, {"ids": list(rollout_ids)})}


def _holds(running: Mapping[str, AnyRow], lease: Lease) -> bool:
    row = running.get(lease.rollout_id)
    if row is None or row.attempt != lease.attempt:
        return False
    return secrets.compare_digest(row.token.encode(), lease.token.encode(errors="replace"))


def _record_last_rewards(transaction: Transaction, ended: Iterable[_End]) -> None:
    """Rewards that came with the finish. One that is no reward fails its attempt: user code is never a store's error."""
    brought: list[tuple[_End, Reward]] = []
    for end in ended:
        if end.finish is not None:
            brought += [(end, reward) for reward in end.finish.rewards]
    named = [reward.call_id for _, reward in brought if reward.call_id is not None]
    known = {
        (row.id, row.rollout_id) for row in execute(transaction.connection, statements.WHOSE_CALLS, {"ids": named})
    }
    new = []
    for end, reward in brought:
        try:
            value = reward_number(reward.value, reward.name)
            if reward.call_id is not None and (reward.call_id, end.row.id) not in known:
                raise RewardError(reason("unknown_call", reward.name, reward.call_id))
        except RewardError as error:
            end.state, end.error = "failed", str(error)
            continue
        whose = {"run_id": end.row.run_id, "rollout_id": end.row.id, "attempt": end.row.attempt}  # as the lease says
        created_ns = reward.created_ns or transaction.now_ns
        new.append(codec.REWARDS.row(replace(reward, value=value, created_ns=created_ns, **whose)))
    transaction.insert_new(rewards, new)


def _settle(connection: Connection, ended: Sequence[_End]) -> None:
    """Find out what is known of attempts that a worker, or silence after a session, ended."""
    if ended:
        _settle_rewards(connection, ended)
        _look_at_calls(connection, ended)
        _look_at_refusals(connection, ended)
        _look_at_spans(connection, ended)


def _settle_rewards(connection: Connection, ended: Iterable[_End]) -> None:
    """The final reward of attempts that succeeded; contradictory ones end as failed."""
    succeeded = {end.key: end for end in ended if end.state == "succeeded"}
    records: dict[tuple[str, int], list[Reward]] = defaultdict(list)
    for row in execute(connection, statements.REWARDS, {"ids": [rollout_id for rollout_id, _ in succeeded]}):
        records[row.rollout_id, row.attempt].append(codec.REWARDS.of_row(row))
    for key, end in succeeded.items():
        try:
            end.reward = final_reward(records[key])
        except RewardError as error:
            end.state, end.error = "failed", str(error)


def _look_at_calls(connection: Connection, ended: Sequence[_End]) -> None:
    """Count the calls; where there is none, say so with the likely cause: evidence before suspicion."""
    counts: Counter[tuple[str, int]] = Counter()
    ids = [end.row.id for end in ended]
    for rollout_id, attempt, count in execute(connection, statements.COUNT_CALLS, {"ids": ids}):
        counts[rollout_id, attempt] = count
    silent = {}
    for end in ended:
        end.calls = counts[end.key]
        if end.calls == 0 and end.state != "lost":
            silent[end.key] = end
            cause = end.finish.diagnosis if end.finish is not None else None
            end.warning = f"{NO_CALLS}: {cause or IGNORED_BASE_URL}"
    ids = [rollout_id for rollout_id, _ in silent]
    for rollout_id, attempt, attributes in execute(connection, statements.UNKNOWN_ROUTES, {"ids": ids}):
        if (rollout_id, attempt) in silent:
            path = orjson.loads(attributes).get("path")
            silent[rollout_id, attempt].warning = reason("unknown_route", NO_CALLS, path)


def _look_at_refusals(connection: Connection, ended: Sequence[_End]) -> None:
    """Say which calls were refused, which explains more than any guess, and whether that was the end of the attempt."""
    refused: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    last_ns: dict[tuple[str, int], int] = {}
    ids = [end.row.id for end in ended]
    for rollout_id, attempt, attributes, started_ns in execute(connection, statements.REFUSED_CALLS, {"ids": ids}):
        if counts := refused_counts(orjson.loads(attributes)):
            refused[rollout_id, attempt].update(counts)
            if OUTGROWN not in counts:
                last_ns[rollout_id, attempt] = max(started_ns, last_ns.get((rollout_id, attempt), 0))
    found = [end for end in ended if end.key in refused]
    failed = [end.row.id for end in found if end.finish is not None and end.finish.state == "failed"]
    served = {
        (rollout_id, attempt): finished_ns
        for rollout_id, attempt, finished_ns in execute(connection, statements.LAST_CALLS, {"ids": failed})
    }
    for end in found:
        said = refused_warning(refused[end.key])
        end.warning = f"{NO_CALLS}: {said}" if end.calls == 0 and end.state != "lost" else said
        end.refused = end.row.id in failed and last_ns.get(end.key, 0) > served.get(end.key, 0)


def _look_at_spans(connection: Connection, ended: Sequence[_End]) -> None:
    """Say what was wrong with spans, by cause."""
    broken: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    ids = [end.row.id for end in ended]
    for rollout_id, attempt, attributes in execute(connection, statements.BROKEN_SPANS, {"ids": ids}):
        broken[rollout_id, attempt].update(broken_counts(orjson.loads(attributes)))
    for end in ended:
        if counts := broken.get(end.key):
            said = broken_warning(counts)
            end.warning = said if end.warning is None else f"{end.warning}; {said}"


def _end(transaction: Transaction, ended: Sequence[_End], *, cancelled: bool = False) -> None:
    """Write what was decided; rollouts that are then finished get their places in the order of their run."""
    if not ended:
        return
    states: list[RolloutState] = ["cancelled" if cancelled else end.next_state() for end in ended]
    places = _places(transaction, ended, states)
    now_ns = transaction.now_ns
    end_attempts, end_rollouts = [], []
    for end, state in zip(ended, states, strict=True):
        error = codec.text(end.error) if end.state != "succeeded" else None
        ran = end.row.state == "running"
        if ran:
            what = {"rollout": end.row.id, "number": end.row.attempt, "state": end.state, "finished_ns": now_ns}
            end_attempts.append({**what, "error": error, "output": codec.text(end.output)})
        if state == "queued":
            transaction.tell(QUEUED, end.row.run_id)
        place = places.get(end.row.id)
        end_rollouts.append(
            {
                "rollout": end.row.id,
                "state": state,
                "lost": end.row.lost + (ran and end.state == "lost"),
                "finished_ns": None if place is None else now_ns,
                "finished_seq": place,
                "reward": end.reward,
                "calls": end.calls,
                "error": error,
                "warning": codec.text(end.warning),
                "refused": end.refused,
            }
        )
    if end_attempts:
        execute_many(transaction.connection, statements.UPDATE_ATTEMPT, end_attempts)
    execute_many(transaction.connection, statements.UPDATE_ROLLOUT, end_rollouts)
    add_summaries(transaction.connection, list(places))


def _places(transaction: Transaction, ended: Sequence[_End], states: Sequence[RolloutState]) -> dict[str, int]:
    by_run: dict[str, list[str]] = defaultdict(list)
    for end, state in zip(ended, states, strict=True):
        if state != "queued":
            by_run[end.row.run_id].append(end.row.id)
    places: dict[str, int] = {}
    for run_id, ids in by_run.items():
        more = {"run": run_id, "more": len(ids)}
        [(last,)] = execute(transaction.connection, statements.COUNT_FINISHED, more)
        places.update(zip(ids, range(last - len(ids) + 1, last + 1), strict=True))
        transaction.tell(FINISHED, run_id, last)
    return places
