"""Summaries of finished rollouts in SQL: written in the transaction that finishes them, filtered without their payloads.

Driven by lifecycle.py, which ends rollouts, and by the store's reads. A page is looked for in three ways, each bounded or
the last: in the first rows of its order; among the few rows that one comparison of the filter leaves, where an index knows
that it leaves few; in all rows of the run, in the order in which they lie. base.py says what the methods mean.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Connection,
    Double,
    Select,
    Text,
    and_,
    asc,
    desc,
    func,
    literal,
    literal_column,
    not_,
    or_,
    select,
    true,
    tuple_,
)
from sqlalchemy.sql.selectable import FromClause

from agentlightning.store import codec
from agentlightning.store.sql import statements
from agentlightning.store.sql.prepared import execute, execute_many
from agentlightning.store.sql.tables import SUMMARY_KEYS, SUMMARY_ORDERS, rollout_summaries, runs
from agentlightning.store.summaries import COLUMNS, Place, failure_of, first_rows, task_key, title_of
from agentlightning.store.summary_types import RolloutSummary, SummaryQuery
from agentlightning.store.where import AGENT, COMPARISONS, AllOf, Comparison, Filter, Not, Value

FIRST_ROWS = 300
MAX_WALKED = 5000
"""First rows of an order that are looked through: a millisecond, in which filters that leave much find a page, and some
tens, which are still less than all rows of a large run take."""
MAX_FEW = 2000
"""Rows that a comparison may leave, to be read by its index one by one."""
INDEXED = frozenset({*SUMMARY_ORDERS, *SUMMARY_KEYS, "id", "finished_ns"})

_table = rollout_summaries
_TYPES: dict[type, Any] = {bool: Boolean(), int: BigInteger(), float: Double(), str: Text()}

Columns = Callable[[str], ColumnElement[Any]]


@dataclass(slots=True)
class CallTotals:
    """Sums over the calls of one attempt."""

    turns: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    forks: int = 0
    agents: set[str] = field(default_factory=set)


def add_summaries(connection: Connection, rollout_ids: Sequence[str]) -> None:
    """Write the summaries of rollouts that this transaction has finished."""
    if not rollout_ids:
        return
    ids = {"ids": list(rollout_ids)}
    totals = _totals(connection, ids)
    new = []
    for row in execute(connection, statements.TO_SUMMARIZE, ids):
        task, mine = orjson.loads(row.task), totals[row.id, row.attempt]
        summary = RolloutSummary(
            **{name: getattr(row, name) for name in ("id", "run_id", "mode", "step", "state", "group_id", "replica")},
            **{name: getattr(row, name) for name in ("reward", "lost", "created_ns", "finished_ns", "finished_seq")},
            task_key=task_key(task),
            title=title_of(task),
            turns=mine.turns,
            prompt_tokens=mine.prompt_tokens,
            sampled_tokens=mine.sampled_tokens,
            forks=mine.forks,
            agents=sorted(mine.agents),
            attempts=row.attempt,
            refused=bool(row.refused),
            failure=failure_of(row.state, row.error, row.warning, bool(row.refused)),
            outcome=None,
            duration_s=0.0 if row.started_ns is None else (row.finished_ns - row.started_ns) / 1e9,
        )
        new.append(codec.SUMMARIES.columns(summary))
    execute_many(connection, statements.ADD_SUMMARY, new)


def _totals(connection: Connection, ids: dict[str, Any]) -> defaultdict[tuple[str, int], CallTotals]:
    found: defaultdict[tuple[str, int], CallTotals] = defaultdict(CallTotals)
    for row in execute(connection, statements.CALL_TOTALS, ids):
        totals, usage = found[row.rollout_id, row.attempt], orjson.loads(row.usage)
        totals.turns += row.turns
        totals.prompt_tokens += int(row.prompt_tokens) + row.turns * int(usage.get("prompt_tokens") or 0)
        totals.sampled_tokens += int(row.sampled_bytes) // 4 + row.turns * int(usage.get("sampled_tokens") or 0)
        totals.forks += row.forks
        if row.agent:
            totals.agents.add(row.agent)
    return found


def read_summaries(
    connection: Connection, query: SummaryQuery, tree: Filter, place: Place | None
) -> list[RolloutSummary]:
    """The rows of the page, and one more where there is a next."""
    if query.run_id is not None:
        return _Page(connection, query, query.run_id, tree, place).rows()
    found: list[RolloutSummary] = []
    for run_id in connection.execute(select(runs.c.id)).scalars().all():
        found += _Page(connection, query, run_id, tree, place).rows()
        found = first_rows(found, query, query.limit + 1)
    return found


class _Page:
    """One page of one run."""

    def __init__(
        self, connection: Connection, query: SummaryQuery, run_id: str, tree: Filter, place: Place | None
    ) -> None:
        self._connection = connection
        self._run_id = run_id
        self._tree = tree
        self._place = place
        self._name = COLUMNS[query.order_by]
        self._descending = query.descending
        self._wanted = query.limit + 1
        self._sqlite = connection.dialect.name == "sqlite"

    def rows(self) -> list[RolloutSummary]:
        if self._tree == AllOf(()):
            found: list[RolloutSummary] = []
            for part in self._parts_of_order():
                found += self._fetch(part.limit(self._wanted - len(found)))
                if len(found) == self._wanted:
                    break
            return found
        rows = self._walk(FIRST_ROWS)
        rows = self._among_few() if rows is None else rows
        rows = self._walk(MAX_WALKED) if rows is None else rows
        if rows is not None:
            return rows
        return self._fetch(self._filtered(_table, self._unindexed).where(_table.c.run_id == self._run_id))

    def _walk(self, count: int) -> list[RolloutSummary] | None:
        """Looks through the first rows of the order; None where they do not fill the page."""
        first = next(self._parts_of_order()).limit(count).subquery()
        found = self._fetch(self._filtered(first, first.c.__getitem__))
        return found if len(found) == self._wanted else None

    def _among_few(self) -> list[RolloutSummary] | None:
        """Looks through the rows that one comparison leaves; None where none is known to leave few."""
        for part in self._tree.parts if isinstance(self._tree, AllOf) else (self._tree,):
            if not isinstance(part, Comparison) or part.field not in INDEXED or part.sign in ("!=", "~"):
                continue
            # By its id a row is found whatever its run: SQLite would take all rows of the run for few.
            run_id = self._unindexed("run_id") if part.field == "id" else _table.c.run_id
            chosen = run_id == self._run_id, condition(part, _table.c.__getitem__, self._sqlite)
            some = select(literal_column("1")).where(*chosen).limit(MAX_FEW + 1).subquery()
            if self._connection.execute(select(func.count()).select_from(some)).scalar_one() <= MAX_FEW:
                few = select(_table).where(*chosen).limit(MAX_FEW).subquery()
                return self._fetch(self._filtered(few, few.c.__getitem__))
        return None

    def _parts_of_order(self) -> Iterator[Select[Any]]:
        """The rows after the place, as queries that indexes answer in order: those with a value, then those without."""
        column, row_id, place = _table.c[self._name], _table.c.id, self._place
        turn: Callable[..., Any] = desc if self._descending else asc
        later = operator.lt if self._descending else operator.gt
        mine = select(_table).where(_table.c.run_id == self._run_id)
        if place is None or place.value is not None:
            valued = mine.where(column.is_not(None)) if column.nullable else mine
            if place is not None:
                valued = valued.where(later(tuple_(column, row_id), tuple_(_typed(place.value), _typed(place.id))))
            yield valued.order_by(turn(column), turn(row_id))
        if column.nullable:
            rest = mine.where(column.is_(None))
            if place is not None and place.value is None:
                rest = rest.where(later(row_id, _typed(place.id)))
            yield rest.order_by(turn(row_id))

    def _filtered(self, source: FromClause, columns: Columns) -> Select[Any]:
        """The page among all rows of the source: it sorts first by what no index does, so that none is walked for it."""
        column, row_id = columns(self._name), columns("id")
        later = operator.lt if self._descending else operator.gt
        chosen = condition(self._tree, columns, self._sqlite)
        if (place := self._place) is not None:
            after = and_(column.is_(None), later(row_id, _typed(place.id)))
            if place.value is not None:
                tied = and_(column == _typed(place.value), later(row_id, _typed(place.id)))
                after = or_(later(column, _typed(place.value)), tied, column.is_(None))
            chosen = and_(chosen, after)
        order = (column.desc(), row_id.desc()) if self._descending else (column, row_id)
        selected = select(*(source.c[name] for name in codec.SUMMARIES.names))
        return selected.where(chosen).order_by(column.is_(None), *order).limit(self._wanted)

    def _unindexed(self, name: str) -> ColumnElement[Any]:
        """The column as something that SQLite has no index of: it knows no number of rows, and would take any for few."""
        column = _table.c[name]
        return literal_column(f"+{name}", column.type) if self._sqlite else column

    def _fetch(self, query: Select[Any]) -> list[RolloutSummary]:
        return [codec.SUMMARIES.of_row(row) for row in self._connection.execute(query)]


def condition(tree: Filter, columns: Columns, sqlite: bool) -> ColumnElement[bool]:
    """The filter as a condition on these columns; every value is a parameter."""
    if isinstance(tree, Comparison):
        return _comparison(tree, columns, sqlite)
    if isinstance(tree, Not):
        return not_(condition(tree.part, columns, sqlite))
    parts = [condition(part, columns, sqlite) for part in tree.parts]
    return and_(true(), *parts) if isinstance(tree, AllOf) else or_(*parts)


def _comparison(comparison: Comparison, columns: Columns, sqlite: bool) -> ColumnElement[bool]:
    sign = comparison.sign
    find = func.instr if sqlite else func.strpos
    if comparison.field == AGENT:
        # A name begins behind a bracket or a comma of its JSON list, and a quote within one behind a backslash.
        listed = columns("agents")
        quoted = [orjson.dumps(value).decode() for value in comparison.values]
        found = or_(*(find(listed, before + name) > 0 for name in quoted for before in "[,"))
        return not_(found) if sign == "!=" else found
    column = columns(comparison.field)
    if sign == "is null":
        return column.is_(None)
    values = [_typed(value) for value in comparison.values]
    if sign == "in":
        return column.in_(values)
    if sign == "~":
        return find(column, values[0]) > 0
    compare: Callable[..., Any] = COMPARISONS[sign]
    compared: ColumnElement[bool] = compare(column, values[0])
    return compared


def _typed(value: Value | None) -> ColumnElement[Any]:
    """A parameter of the value's own type: a column's would round a number that is no integer."""
    return literal(value, _TYPES[type(value)])
