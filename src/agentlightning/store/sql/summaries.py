"""Summaries of finished rollouts in SQL: written in the transaction that finishes them, filtered without their payloads.

Driven by lifecycle.py, which ends rollouts, and by the store's reads. A page is looked for in the first rows of its order,
which an index gives, and else among all rows of the run. base.py says what the methods mean.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import sqlalchemy as sa

from agentlightning.store.sql.database import execute, execute_many
from agentlightning.store.sql.tables import SUMMARY_KEYS, calls, rollout_summaries, rollouts, runs
from agentlightning.store.summaries import (
    COLUMNS,
    SUMMARIES,
    RolloutSummary,
    SummaryPlace,
    SummaryQuery,
    failure_of,
    first_rows,
    task_key,
    title_of,
)
from agentlightning.store.where import AGENT, COMPARISONS, AllOf, Comparison, Filter, Not, Value

FIRST_ROWS = 300
"""First rows of an order that are looked through: a millisecond, in which filters that leave much find a page."""

# Of external models counts what they reported. Few calls have that, so a rollout is a row for each of its agents. What a
# fork replayed was sampled for another rollout.
_CALL_TOTALS = (
    sa.select(
        calls.c.rollout_id,
        calls.c.attempt,
        calls.c.agent,
        calls.c.usage,
        sa.func.count().label("turns"),
        sa.func.sum(calls.c.prompt_tokens).label("prompt_tokens"),
        sa.func.sum(sa.case((calls.c.replayed_id.is_(None), sa.func.length(calls.c.sampled_ids)), else_=0)).label(
            "sampled_bytes"
        ),
        sa.func.count(calls.c.fork_cause).label("forks"),
    )
    .where(calls.c.rollout_id.in_(sa.bindparam("ids", expanding=True)))
    .group_by(calls.c.rollout_id, calls.c.attempt, calls.c.agent, calls.c.usage)
)
_UNREAD = ("sampling", "retry", "priority", "calls", "prompts", "fork")
_TO_SUMMARIZE = sa.select(*[column for column in rollouts.c if column.name not in _UNREAD]).where(
    rollouts.c.id.in_(sa.bindparam("ids", expanding=True))
)
_ADD_SUMMARY = sa.insert(rollout_summaries)

_table = rollout_summaries
_TYPES: dict[type, Any] = {bool: sa.Boolean(), int: sa.BigInteger(), float: sa.Double(), str: sa.Text()}
Columns = Callable[[str], sa.ColumnElement[Any]]


_KEPT = (
    *("id", "run_id", "mode", "step", "state", "group_id", "replica", "reward", "lost"),
    *("cause", "created_ns", "finished_ns"),
)


def add_summaries(connection: sa.Connection, rollout_ids: Sequence[str]) -> None:
    """Write the summaries of rollouts that this transaction has finished."""
    if not rollout_ids:
        return
    ids = {"ids": list(rollout_ids)}
    sums: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    agents: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for row in execute(connection, _CALL_TOTALS, ids):
        totals, usage = sums[row.rollout_id, row.attempt], orjson.loads(row.usage)
        totals["turns"] += row.turns
        totals["prompt_tokens"] += int(row.prompt_tokens) + row.turns * int(usage.get("prompt_tokens") or 0)
        totals["sampled_tokens"] += int(row.sampled_bytes) // 4 + row.turns * int(usage.get("sampled_tokens") or 0)
        totals["forks"] += row.forks
        agents[row.rollout_id, row.attempt] |= {row.agent} - {None, ""}
    new: list[dict[str, Any]] = []
    for row in execute(connection, _TO_SUMMARIZE, ids):
        task, refused = orjson.loads(row.task), bool(row.refused)
        totals = sums[row.id, row.attempt]
        summary = RolloutSummary(
            **{name: getattr(row, name) for name in _KEPT},
            turns=totals["turns"],
            prompt_tokens=totals["prompt_tokens"],
            sampled_tokens=totals["sampled_tokens"],
            forks=totals["forks"],
            finished_seq=row.finished_seq,
            task_key=task_key(task),
            title=title_of(task),
            agents=sorted(agents[row.id, row.attempt]),
            attempts=row.attempt,
            refused=refused,
            failure=failure_of(row.state, row.error, row.warning, refused),
            outcome=None,
            duration_s=0.0 if row.started_ns is None else (row.finished_ns - row.started_ns) / 1e9,
        )
        new.append(SUMMARIES.columns(summary))
    execute_many(connection, _ADD_SUMMARY, new)


def read_summaries(
    connection: sa.Connection, query: SummaryQuery, tree: Filter, place: SummaryPlace | None
) -> list[RolloutSummary]:
    """The rows of the page, and one more where there is a next."""
    all_runs = sa.select(runs.c.id)
    chosen = all_runs if query.run_id is None else all_runs.where(runs.c.id == query.run_id)
    found: list[RolloutSummary] = []
    for run_id in connection.execute(chosen).scalars().all():
        found += _Page(connection, query, run_id, tree, place).rows()
        found = first_rows(found, query, query.limit + 1)
    return found


class _Page:
    """One page of one run."""

    def __init__(
        self, connection: sa.Connection, query: SummaryQuery, run_id: str, tree: Filter, place: SummaryPlace | None
    ) -> None:
        self._connection = connection
        self._run_id = run_id
        self._tree = tree
        self._place = place
        self._name = COLUMNS[query.order_by]
        self._wanted = query.limit + 1
        self._sqlite = connection.dialect.name == "sqlite"
        self._turn: Callable[..., Any] = sa.desc if query.descending else sa.asc
        self._later: Callable[..., Any] = operator.lt if query.descending else operator.gt

    def rows(self) -> list[RolloutSummary]:
        columns: Columns = _table.c.__getitem__
        if self._tree != AllOf(()):
            first = next(self._parts(columns)).limit(FIRST_ROWS).subquery()
            chosen = sa.select(first).where(condition(self._tree, first.c.__getitem__, self._sqlite))
            order = self._turn(first.c[self._name]), self._turn(first.c.id)
            found = self._fetch(chosen.order_by(*order).limit(self._wanted))
            if len(found) == self._wanted:
                return found
            columns = self._unindexed  # looks through all rows of the run, or those that the index of a key finds
        found = []
        for part in self._parts(columns):
            chosen = part.where(condition(self._tree, columns, self._sqlite))
            found += self._fetch(chosen.limit(self._wanted - len(found)))
            if len(found) == self._wanted:
                break
        return found

    def _parts(self, columns: Columns) -> Iterator[sa.Select[Any]]:
        """The rows after the place in two queries, which indexes answer in order: those with a value, those without."""
        column, row_id, place, nullable = columns(self._name), columns("id"), self._place, _table.c[self._name].nullable
        mine = sa.select(_table).where(_table.c.run_id == self._run_id)
        if place is None or place.value is not None:
            valued = mine.where(column.is_not(None)) if nullable else mine
            if place is not None:
                before = sa.tuple_(typed(place.value), typed(place.id))
                valued = valued.where(self._later(sa.tuple_(column, row_id), before))
            yield valued.order_by(self._turn(column), self._turn(row_id))
        if nullable:
            rest = mine.where(column.is_(None))
            if place is not None and place.value is None:
                rest = rest.where(self._later(row_id, typed(place.id)))
            yield rest.order_by(self._turn(row_id))

    def _unindexed(self, name: str) -> sa.ColumnElement[Any]:
        """The column, which SQLite takes to have no index unless it is a key: it would read most rows of a run by it."""
        column = _table.c[name]
        if not self._sqlite or name in SUMMARY_KEYS or (name == "id" and self._name != "finished_ns"):
            return column
        return sa.literal_column(f"+{name}", column.type)

    def _fetch(self, query: sa.Select[Any]) -> list[RolloutSummary]:
        return [SUMMARIES.of_row(row) for row in self._connection.execute(query)]


def condition(tree: Filter, columns: Columns, sqlite: bool) -> sa.ColumnElement[bool]:
    """The filter as a condition on these columns; every value is a parameter."""
    if isinstance(tree, Comparison):
        return _comparison(tree, columns, sqlite)
    if isinstance(tree, Not):
        return sa.not_(condition(tree.part, columns, sqlite))
    parts = [condition(part, columns, sqlite) for part in tree.parts]
    return sa.and_(sa.true(), *parts) if isinstance(tree, AllOf) else sa.or_(*parts)


def _comparison(comparison: Comparison, columns: Columns, sqlite: bool) -> sa.ColumnElement[bool]:
    sign = comparison.sign
    find = sa.func.instr if sqlite else sa.func.strpos
    if comparison.field == AGENT:
        # A name begins behind a bracket or a comma of its JSON list, and a quote within one behind a backslash.
        listed = columns("agents")
        quoted = [orjson.dumps(value).decode() for value in comparison.values]
        found = sa.or_(*(find(listed, before + name) > 0 for name in quoted for before in "[,"))
        return sa.not_(found) if sign == "!=" else found
    column = columns(comparison.field)
    if sign == "is null":
        return column.is_(None)
    values = [typed(value) for value in comparison.values]
    if sign == "in":
        return column.in_(values)
    if sign == "~":
        return find(column, values[0]) > 0
    compare: Callable[..., Any] = COMPARISONS[sign]
    compared: sa.ColumnElement[bool] = compare(column, values[0])
    return compared


def typed(value: Value | None) -> sa.ColumnElement[Any]:
    """A parameter of the value's own type: a column's would round a number that is no integer."""
    return sa.literal(value, _TYPES[type(value)])
