"""Summaries of finished rollouts by column, in chunks of a run's rows: a filter over a million is some array operations.

Driven by the transactions that finish rollouts, which write a chunk whenever a run has so many more, and by summaries.py,
which reads here what no index answers. A chunk holds the values of one field as a packed array. Texts are kept once per run
(`summary_texts`), and columns hold their hashes: the database compares the texts, as everywhere, and arrays their hashes.
Only `outcome`, and `reward` of a session, change once a rollout is finished; the column is then written anew in the same
transaction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Double, Row, and_, bindparam, delete, func, insert, select

from agentlightning.store import codec
from agentlightning.store.sql.column_cache import ColumnCache
from agentlightning.store.sql.conditions import condition
from agentlightning.store.sql.prepared import execute_binary
from agentlightning.store.sql.statements import among
from agentlightning.store.sql.tables import (
    ROWS_PER_CHUNK,
    SUMMARY_NUMBERS,
    SUMMARY_TEXTS,
    rollout_summaries,
    summary_chunks,
    summary_texts,
)
from agentlightning.store.sql.upsert import upsert
from agentlightning.store.summaries import Place
from agentlightning.store.where import AGENT, COMPARISONS, AllOf, Comparison, Filter, Not, compare, fields_of

_CHUNKS = (
    select(summary_chunks.c.field, summary_chunks.c.chunk, summary_chunks.c.kind, summary_chunks.c.data)
    .where(
        summary_chunks.c.run_id == bindparam("run"),
        summary_chunks.c.chunk >= bindparam("first"),
        among(summary_chunks.c.field),
    )
    .order_by(summary_chunks.c.field, summary_chunks.c.chunk)
)

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

_INTEGERS = ("i1", "i2", "i4", "i8")
_NO_TEXT = 0
CHANGING = frozenset({"outcome"})
"""Fields of finished rollouts that change: a column of theirs is read anew."""
_table = rollout_summaries


# --- writing ----------------------------------------------------------------------------------------------------------


def write_chunk(
    connection: Connection,
    run_id: str,
    chunk: int,
    fields: Collection[str] = (*SUMMARY_NUMBERS, *SUMMARY_TEXTS),
    size: int = ROWS_PER_CHUNK,
) -> None:
    """Write these fields of the rows of a chunk, all of which are there."""
    first = chunk * size
    mine = _table.c.run_id == run_id, _table.c.finished_seq > first, _table.c.finished_seq <= first + size
    rows = connection.execute(
        select(*(_table.c[name] for name in fields)).where(*mine).order_by(_table.c.finished_seq)
    ).all()
    if not rows:  # of a run that is being deleted
        return
    written = [
        {"run_id": run_id, "field": name, "chunk": chunk, "kind": column.dtype.str[1:], "data": column.tobytes()}
        for name, column in ((name, _column(connection, run_id, name, rows, n)) for n, name in enumerate(fields))
    ]
    replaced = summary_chunks.c.run_id == run_id, summary_chunks.c.chunk == chunk, summary_chunks.c.field.in_(fields)
    connection.execute(delete(summary_chunks).where(*replaced))
    connection.execute(insert(summary_chunks), written)


def rewrite_columns(
    connection: Connection, run_id: str, rollout_ids: Sequence[str], fields: Sequence[str] = ("outcome",)
) -> None:
    """Write these fields of these rollouts anew where chunks have them."""
    places = {
        (row.finished_seq - 1) // ROWS_PER_CHUNK
        for part in codec.chunks(rollout_ids)
        for row in connection.execute(select(_table.c.finished_seq).where(_table.c.id.in_(part)))
    }
    known = select(summary_chunks.c.chunk).where(
        summary_chunks.c.run_id == run_id, summary_chunks.c.field == fields[0], summary_chunks.c.chunk.in_(places)
    )
    for chunk in connection.execute(known).scalars().all():
        write_chunk(connection, run_id, chunk, fields)


def write_all_chunks(connection: Connection, size: int = ROWS_PER_CHUNK) -> None:
    """Write all chunks that rows are there for, of every run: for rows that came by another way than by finishing."""
    last = select(_table.c.run_id, func.max(_table.c.finished_seq)).group_by(_table.c.run_id)
    for run_id, count in connection.execute(last).all():
        for chunk in range(count // size):
            write_chunk(connection, run_id, chunk, size=size)


def _column(connection: Connection, run_id: str, name: str, rows: Sequence[Row[Any]], place: int) -> Array:
    values = [row[place] for row in rows]
    if name not in SUMMARY_TEXTS:
        if isinstance(_table.c[name].type, Double):
            return np.array(values, "<f8")  # None becomes NaN
        whole = np.array(values, "<i8")
        fitting = (kind for kind in _INTEGERS if np.array_equal(whole.astype(kind), whole))
        return whole.astype(f"<{next(fitting)}")
    hashes = {text: hash_of(text) for text in set(values)}
    texts = [
        {"run_id": run_id, "field": name, "hash": number, "text": text}
        for text, number in hashes.items()
        if text is not None
    ]
    if texts:
        connection.execute(upsert(connection, summary_texts).on_conflict_do_nothing(), texts)
    return np.array([hashes[value] for value in values], "<i8")


def hash_of(text: str | None) -> int:
    """64 bits, of which 0 is no text: of a million texts two are alike with a probability of 3 in 100,000,000."""
    if text is None:
        return _NO_TEXT
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of chunks that a page may have, by `finished_seq`."""

    last: int
    """The last place in the order of finished rollouts that chunks have; all rows after it are to be looked through."""
    rows: list[int]
    """On the page unless others come before them."""
    ties: list[tuple[float | None, Array]]
    """Values that several rows have of which their ids decide, and those rows."""


def covers(tree: Filter) -> bool:
    """True where columns have all fields of the filter."""
    return fields_of(tree) <= {*SUMMARY_NUMBERS, *SUMMARY_TEXTS, "run_id", AGENT}


def find(columns: Columns, tree: Filter, order: tuple[str, bool], place: Place | None, count: int) -> Found:
    """Looks through the chunks of a run for the first so many rows after the place. `order`: a field, and True where it
    descends."""
    name, descending = order
    if columns.rows == 0:
        return Found(0, [], [])
    chosen = np.flatnonzero(columns.where(tree)[0])
    values, places = columns[name][chosen], columns["finished_seq"][chosen]
    return Found(columns.last, *_first(values, places, descending, place, count))


def _first(
    values: Array, places: Array, descending: bool, place: Place | None, count: int
) -> tuple[list[int], list[tuple[float | None, Array]]]:
    missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), np.bool_)
    ties: list[tuple[float | None, Array]] = []

    def tie(value: float | None, tied: Bools) -> None:
        if tied.any():
            ties.append((value, places[tied]))

    rest = ~missing
    if place is not None:
        if place.value is None:
            tie(None, missing)
            return [], ties
        tie(place.value, values == place.value)
        rest &= values < place.value if descending else values > place.value
    later = values[rest]
    if len(later) <= count:
        if len(later) < count:
            tie(None, missing)
        return places[rest].tolist(), ties
    last = np.partition(later, len(later) - count if descending else count - 1)[
        len(later) - count if descending else count - 1
    ]
    tie(last.item(), rest & (values == last))
    return places[rest & (values > last if descending else values < last)].tolist(), ties


class Columns:
    """Columns of a run with these fields, as far as its chunks follow each other from the first.

    Those in the cache are read from where it ends. It may be ahead of this transaction: rows after `newest_seq`,
    the last that the transaction knows, are left out.
    """

    def __init__(
        self, connection: Connection, run: tuple[str, int], fields: Iterable[str], newest_seq: int, cache: ColumnCache
    ) -> None:
        self._connection = connection
        self._run_id, made_ns = run
        names = {"agents" if name == AGENT else name for name in fields} | {"finished_seq"}
        found = {name: self._read(name, made_ns, cache) for name in names - {"run_id"}}
        rows = min(map(len, found.values()))
        self.rows = int(np.searchsorted(found["finished_seq"][:rows], newest_seq, "right"))
        self._columns = {name: column[: self.rows] for name, column in found.items()}
        self.last = int(self._columns["finished_seq"][-1]) if self.rows else 0

    def _read(self, name: str, made_ns: int, cache: ColumnCache) -> Array:
        key = self._run_id, made_ns, name
        chunks, known = (0, None) if name in CHANGING else cache.get(key)
        parts: list[Array] = [] if known is None else [known]
        for row in execute_binary(self._connection, _CHUNKS, {"run": self._run_id, "first": chunks, "ids": [name]}):
            if row.chunk == chunks:  # a gap ends what can be relied on
                parts.append(np.frombuffer(row.data, f"<{row.kind}"))
                chunks += 1
        if not parts:
            return np.empty(0, "<i8")
        column = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if name not in CHANGING and column is not known:
            cache.put(key, chunks, column)
        return column

    def __getitem__(self, name: str) -> Array:
        return self._columns[name]

    def where(self, tree: Filter) -> tuple[Bools, Bools]:
        """The rows for which the filter is true, and those for which it is false; for others it is unknown."""
        if isinstance(tree, Comparison):
            return self._compare(tree)
        if isinstance(tree, Not):
            true, false = self.where(tree.part)
            return false, true
        conjunction = isinstance(tree, AllOf)
        true = np.full(self.rows, conjunction)
        false = ~true
        for part in tree.parts:
            its_true, its_false = self.where(part)
            if conjunction:
                true, false = true & its_true, false | its_false
            else:
                true, false = true | its_true, false & its_false
        return true, false

    def _compare(self, comparison: Comparison) -> tuple[Bools, Bools]:
        name, sign, values = comparison.field, comparison.sign, comparison.values
        if name == "run_id":
            true = np.full(self.rows, sign != "is null" and compare(self._run_id, sign, values))
            return true, ~true
        column = self._columns["agents" if name == AGENT else name]
        texts = name == AGENT or name in SUMMARY_TEXTS
        if texts:
            missing = column == _NO_TEXT
        else:
            missing = np.isnan(column) if column.dtype.kind == "f" else np.zeros(self.rows, np.bool_)
        if sign == "is null":
            return missing, ~missing
        if texts:
            true = _is_among(column, self._hashes(comparison))
        elif sign == "in":
            # Values of integers that are floats have a fraction, and equal none; beside one, an array would round others.
            whole = column.dtype.kind == "i"
            same = [value for value in values if not (whole and isinstance(value, float))]
            true = np.isin(column, np.array(same, np.int64 if whole else np.float64))
        else:
            compared: Any = COMPARISONS[sign](column, values[0])
            true = compared
        return true & ~missing, ~true & ~missing

    def _hashes(self, comparison: Comparison) -> Array:
        """Of the texts of the run for which the comparison is true, as the database finds it."""
        name = "agents" if comparison.field == AGENT else comparison.field
        known = summary_texts.c.run_id == self._run_id, summary_texts.c.field == name
        sqlite = self._connection.dialect.name == "sqlite"
        chosen = condition(comparison, lambda _: summary_texts.c.text, sqlite)
        found = self._connection.execute(select(summary_texts.c.hash).where(and_(*known, chosen)))
        return np.array(found.scalars().all(), np.int64)


def _is_among(column: Array, hashes: Array) -> Bools:
    """The rows whose hash is one of these: compared are only those whose last 16 bits one of them has."""
    last_bits = np.zeros(1 << 16, np.bool_)
    last_bits[hashes & 0xFFFF] = True
    among: Bools = last_bits[column & 0xFFFF]
    likely = np.flatnonzero(among)
    among[likely] = np.isin(column[likely], hashes)
    return among
