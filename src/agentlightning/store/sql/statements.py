"""The statements of the life of rollouts that are executed thousands of times: made once, since making one costs more CPU
than executing it does.

Driven by lifecycle.py. Their parameters are `ids` (a list), and those that their comments name. Decides nothing.
"""

from __future__ import annotations

import functools

from sqlalchemy import Column, ColumnElement, and_, bindparam, case, func, insert, or_, select, update

from agentlightning.store.gateway_events import UNKNOWN_ROUTE
from agentlightning.store.sql import tables
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
from agentlightning.store.sql.upsert import Upsert, upsert_into


def among(column: Column[str]) -> ColumnElement[bool]:
    """The column is one of `ids`."""
    return column.in_(bindparam("ids", expanding=True))


ROLLOUT = select(*rollouts.c, consumption.c.outcome).select_from(
    rollouts.outerjoin(consumption, consumption.c.rollout_id == rollouts.c.id)
)
"""Rollouts with their outcomes, as rows of `codec.ROLLOUTS`."""

RUNS = select(runs.c.id).where(among(runs.c.id))
# run
WORKERS = select(workers.c.id, workers.c.host, workers.c.pid).where(
    workers.c.run_id == bindparam("run"), among(workers.c.id)
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
TAKE = (
    update(rollouts)
    .where(rollouts.c.id.in_(select(_NEXT.c.id)))
    .values(
        state="running",
        attempt=rollouts.c.attempt + 1,
        started_ns=func.coalesce(rollouts.c.started_ns, bindparam("now")),
    )
    .returning(*rollouts.c)
)

_COLUMNS_TO_END = (
    rollouts.c.id,
    rollouts.c.run_id,
    rollouts.c.attempt,
    rollouts.c.retry,
    rollouts.c.lost,
    rollouts.c.state,
    rollouts.c.group_id,
)
LIVE = select(*_COLUMNS_TO_END).where(
    among(rollouts.c.id), or_(rollouts.c.state == "queued", rollouts.c.state == "running")
)
_RUNNING = (
    select(*_COLUMNS_TO_END, attempts.c.token, attempts.c.worker_id)
    .join_from(attempts, rollouts, attempts.c.rollout_id == rollouts.c.id)
    .where(attempts.c.state == tables.RUNNING)
)
RUNNING = _RUNNING.where(among(attempts.c.rollout_id))
# now
OVERDUE = _RUNNING.where(attempts.c.lease_expires_ns <= bindparam("now"))
# run, worker
HELD = _RUNNING.where(attempts.c.worker_id == bindparam("worker"), rollouts.c.run_id == bindparam("run"))

# run
NEWEST_TEMPLATES = (
    select(resources.c.name, resources.c.version)
    .select_from(resource_versions)
    .join(
        resources,
        and_(
            resources.c.run_id == resource_versions.c.run_id,
            resources.c.name == resource_versions.c.name,
            resources.c.version == resource_versions.c.last,
        ),
    )
    .where(resource_versions.c.run_id == bindparam("run"), resources.c.kind == "prompt_template")
)

START_ATTEMPT = insert(attempts)

# ids, expires. A rollout has one running attempt at most.
EXTEND_LEASES = (
    update(attempts)
    .where(among(attempts.c.rollout_id), attempts.c.state == tables.RUNNING)
    .values(lease_expires_ns=bindparam("expires"))
)
# The columns that these two set are those that their parameters name, beside rollout and number.
UPDATE_ATTEMPT = update(attempts).where(
    attempts.c.rollout_id == bindparam("rollout"), attempts.c.attempt == bindparam("number")
)
UPDATE_ROLLOUT = update(rollouts).where(rollouts.c.id == bindparam("rollout"))
# run, more
COUNT_FINISHED = (
    update(runs)
    .where(runs.c.id == bindparam("run"))
    .values(finished=runs.c.finished + bindparam("more"))
    .returning(runs.c.finished)
)

WHOSE_CALLS = select(calls.c.id, calls.c.rollout_id).where(among(calls.c.id))
COUNT_CALLS = (
    select(calls.c.rollout_id, calls.c.attempt, func.count())
    .where(among(calls.c.rollout_id))
    .group_by(calls.c.rollout_id, calls.c.attempt)
)
# Of external models counts what they reported. Few calls have that, so a rollout is a row for each of its agents. What a
# fork replayed was sampled for another rollout.
CALL_TOTALS = (
    select(
        calls.c.rollout_id,
        calls.c.attempt,
        calls.c.agent,
        calls.c.usage,
        func.count().label("turns"),
        func.sum(calls.c.prompt_tokens).label("prompt_tokens"),
        func.sum(case((calls.c.replayed_id.is_(None), func.length(calls.c.sampled_ids)), else_=0)).label(
            "sampled_bytes"
        ),
        func.count(calls.c.fork_cause).label("forks"),
    )
    .where(among(calls.c.rollout_id))
    .group_by(calls.c.rollout_id, calls.c.attempt, calls.c.agent, calls.c.usage)
)
TO_SUMMARIZE = select(
    *(
        column
        for column in rollouts.c
        if column.name not in ("sampling", "retry", "priority", "calls", "prompts", "fork")
    )
).where(among(rollouts.c.id))
ADD_SUMMARY = insert(rollout_summaries)
# rollout, outcome
SET_OUTCOME = update(rollout_summaries).where(rollout_summaries.c.id == bindparam("rollout"))
UNKNOWN_ROUTES = (
    select(spans.c.rollout_id, spans.c.attempt, spans.c.attributes)
    .where(spans.c.name == UNKNOWN_ROUTE, among(spans.c.rollout_id))
    .order_by(spans.c.started_ns.desc())
)
BROKEN_SPANS = select(spans.c.rollout_id, spans.c.attempt, spans.c.attributes).where(
    tables.BROKEN, among(spans.c.rollout_id)
)
REFUSED_CALLS = select(spans.c.rollout_id, spans.c.attempt, spans.c.attributes, spans.c.started_ns).where(
    tables.REFUSED, among(spans.c.rollout_id)
)
LAST_CALLS = (
    select(calls.c.rollout_id, calls.c.attempt, func.max(calls.c.finished_ns))
    .where(among(calls.c.rollout_id))
    .group_by(calls.c.rollout_id, calls.c.attempt)
)
REWARDS = select(rewards).where(among(rewards.c.rollout_id)).order_by(rewards.c.created_ns, rewards.c.seq)


@functools.cache
def see_workers(dialect: str, changing: tuple[str, ...]) -> Upsert:
    """Insert workers, or change these columns of those that are known."""
    statement = upsert_into(dialect, workers)
    changes = {name: statement.excluded[name] for name in changing}
    return statement.on_conflict_do_update(index_elements=["run_id", "id"], set_=changes)


@functools.cache
def enqueue_rollouts(dialect: str) -> Upsert:
    """Insert rollouts, except for those whose place is taken."""
    place = ["run_id", "group_id", "replica"]
    return upsert_into(dialect, rollouts).on_conflict_do_nothing(index_elements=place)
