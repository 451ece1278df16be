"""Summaries of finished rollouts in SQL: written in the transaction that finishes them, filtered without their payloads.

Driven by lifecycle.py, which ends rollouts, and by the store's reads. A page is looked for in three ways, each bounded or
the last: in the first rows of its order; among the few rows that one comparison of the filter leaves, where an index knows
that it leaves few; in all rows of the run, by their columns (columns.py). base.py says what the methods mean.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    asc,
    desc,
    func,
    literal_column,
    or_,
    select,
    tuple_,
)
from sqlalchemy.sql.selectable import FromClause

from agentlightning.store import codec
from agentlightning.store.sql import statements
from agentlightning.store.sql.column_cache import ColumnCache
from agentlightning.store.sql.conditions import Columns, condition, typed
from agentlightning.store.sql.prepared import execute, execute_many
from agentlightning.store.sql.tables import ROWS_PER_CHUNK, SUMMARY_KEYS, SUMMARY_ORDERS, rollout_summaries, runs
from agentlightning.store.summaries import COLUMNS, Place, failure_of, first_rows, is_after, task_key, title_of
from agentlightning.store.summary_types import RolloutSummary, SummaryQuery
from agentlightning.store.where import AllOf, Comparison, Filter, fields_of

FIRST_ROWS = 300
"""First rows of an order that are looked through: a millisecond, in which filters that leave much find a page."""
MAX_FEW = 2000
"""Rows that a comparison may leave, to be read by its index one by one, in a run of MAX_FEW * ROWS_PER_READ and more."""
MIN_FEW = 100
ROWS_PER_READ = 300
"""Rows that are looked through by column in the time in which one is found by an index and read."""
MAX_TIES = 500
"""Rows alike in the order that are read to be put in that of their ids."""
INDEXED = frozenset({*SUMMARY_ORDERS, *SUMMARY_KEYS, "id", "finished_ns"})

_table = rollout_summaries


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
    new: list[dict[str, Any]] = []
    full: list[tuple[str, int]] = []
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
        if summary.finished_seq % ROWS_PER_CHUNK == 0:
            full.append((summary.run_id, summary.finished_seq // ROWS_PER_CHUNK - 1))
    execute_many(connection, statements.ADD_SUMMARY, new)
    if full:
        from agentlightning.store.sql.columns import write_chunk

        for run_id, chunk in full:
            write_chunk(connection, run_id, chunk)


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
    connection: Connection, query: SummaryQuery, tree: Filter, place: Place | None, cache: ColumnCache
) -> list[RolloutSummary]:
    """The rows of the page, and one more where there is a next."""
    all_runs = select(runs.c.id, runs.c.created_ns)
    chosen = all_runs if query.run_id is None else all_runs.where(runs.c.id == query.run_id)
    found: list[RolloutSummary] = []
    for run_id, made_ns in connection.execute(chosen).all():
        found += _Page(connection, query, (run_id, made_ns), tree, place, cache).rows()
        found = first_rows(found, query, query.limit + 1)
    return found


class _Page:
    """One page of one run."""

    def __init__(
        self,
        connection: Connection,
        query: SummaryQuery,
        run: tuple[str, int],
        tree: Filter,
        place: Place | None,
        cache: ColumnCache,
    ) -> None:
        """`run`: its id, and the time at which it was made."""
        self._connection = connection
        self._query = query
        self._run = run
        self._run_id = run[0]
        self._cache = cache
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
        return self._scan() if rows is None else rows

    def _walk(self, count: int) -> list[RolloutSummary] | None:
        """Looks through the first rows of the order; None where they do not fill the page."""
        first = next(self._parts_of_order()).limit(count).subquery()
        found = self._fetch(self._filtered(first, first.c.__getitem__))
        return found if len(found) == self._wanted else None

    def _among_few(self) -> list[RolloutSummary] | None:
        """Looks through the rows that one comparison leaves; None where none is known to leave few."""
        few_rows = max(MIN_FEW, min(MAX_FEW, self._newest_seq // ROWS_PER_READ))
        for part in self._tree.parts if isinstance(self._tree, AllOf) else (self._tree,):
            if not isinstance(part, Comparison) or part.field not in INDEXED or part.sign in ("!=", "~"):
                continue
            # By its id a row is found whatever its run: SQLite would take all rows of the run for few.
            run_id = self._unindexed("run_id") if part.field == "id" else _table.c.run_id
            chosen = run_id == self._run_id, condition(part, _table.c.__getitem__, self._sqlite)
            some = select(literal_column("1")).where(*chosen).limit(few_rows + 1).subquery()
            if self._connection.execute(select(func.count()).select_from(some)).scalar_one() <= few_rows:
                few = self._by_id(*chosen).limit(few_rows).subquery()
                return self._fetch(self._filtered(few, few.c.__getitem__))
        return None

    def _scan(self) -> list[RolloutSummary]:
        """Looks through all rows: by their columns as far as chunks have them, then through those that finished later."""
        from agentlightning.store.sql import columns  # numpy takes longer to load than most stores to read

        mine = self._filtered(_table, self._unindexed).where(_table.c.run_id == self._run_id)
        if not columns.covers(self._tree):
            return self._fetch(mine)
        fields = fields_of(self._tree) | {self._name}
        mine_by_column = columns.Columns(self._connection, self._run, fields, self._newest_seq, self._cache)
        order = self._name, self._descending
        found = columns.find(mine_by_column, self._tree, order, self._place, self._wanted)
        rows = self._later(mine, found.last) if found.last else self._fetch(mine)
        chosen = found.rows
        for value, tied in found.ties:
            if len(tied) <= MAX_TIES:
                chosen += tied.tolist()
            else:
                rows += self._tied(value)
        if chosen:
            rows += self._fetch(self._by_id(_table.c.run_id == self._run_id, _table.c.finished_seq.in_(chosen)))
        several = {row.id: row for row in rows if is_after(row, self._place, self._query)}  # ties are found twice
        return first_rows(several.values(), self._query, self._wanted)

    def _later(self, mine: Select[Any], last: int) -> list[RolloutSummary]:
        """Those of the run's rows that finished after what chunks have. The upper bound tells a planner how few they are."""
        if self._newest_seq <= last:
            return []
        return self._fetch(mine.where(_table.c.finished_seq.between(last + 1, self._newest_seq)))

    @functools.cached_property
    def _newest_seq(self) -> int:
        """The place of the run's last finished rollout in their order, which is about their number."""
        newest = select(func.max(_table.c.finished_seq)).where(_table.c.run_id == self._run_id)
        return self._connection.execute(newest).scalar() or 0

    def _by_id(self, *chosen: ColumnElement[bool]) -> Select[Any]:
        """Rows that an index finds. First their ids, which are in it: for whole rows SQLite would read all of the run."""
        return select(_table).where(_table.c.id.in_(select(_table.c.id).where(*chosen)))

    def _tied(self, value: float | None) -> list[RolloutSummary]:
        """The first rows of those with this value: so many match that a walk in the order of their ids meets them soon."""
        column = _table.c[self._name]
        tied = column.is_(None) if value is None else column == typed(value)
        rows = select(_table).where(_table.c.run_id == self._run_id, tied)
        rows = rows.where(condition(self._tree, self._unindexed, self._sqlite))
        if (place := self._place) is not None and place.value == value:
            rows = rows.where((operator.lt if self._descending else operator.gt)(_table.c.id, typed(place.id)))
        turn: Callable[..., Any] = desc if self._descending else asc
        return self._fetch(rows.order_by(turn(_table.c.id)).limit(self._wanted))

    def _parts_of_order(self) -> Iterator[Select[Any]]:
        """The rows after the place, as queries that indexes answer in order: those with a value, then those without."""
        column, row_id, place = _table.c[self._name], _table.c.id, self._place
        turn: Callable[..., Any] = desc if self._descending else asc
        later = operator.lt if self._descending else operator.gt
        mine = select(_table).where(_table.c.run_id == self._run_id)
        if place is None or place.value is not None:
            valued = mine.where(column.is_not(None)) if column.nullable else mine
            if place is not None:
                valued = valued.where(later(tuple_(column, row_id), tuple_(typed(place.value), typed(place.id))))
            yield valued.order_by(turn(column), turn(row_id))
        if column.nullable:
            rest = mine.where(column.is_(None))
            if place is not None and place.value is None:
                rest = rest.where(later(row_id, typed(place.id)))
            yield rest.order_by(turn(row_id))

    def _filtered(self, source: FromClause, columns: Columns) -> Select[Any]:
        """The page among all rows of the source: it sorts first by what no index does, so that none is walked for it."""
        column, row_id = columns(self._name), columns("id")
        later = operator.lt if self._descending else operator.gt
        chosen = condition(self._tree, columns, self._sqlite)
        if (place := self._place) is not None:
            after = and_(column.is_(None), later(row_id, typed(place.id)))
            if place.value is not None:
                tied = and_(column == typed(place.value), later(row_id, typed(place.id)))
                after = or_(later(column, typed(place.value)), tied, column.is_(None))
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
