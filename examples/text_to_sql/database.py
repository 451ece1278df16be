"""SQLite as a tool of an agent: databases are read-only, queries may only select, and each has a limit on its work."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MAX_ROWS = 3000
MAX_BYTES = 1_000_000
"""Of one value or query."""
LIMIT_STEPS = 20_000_000
"""Instructions of SQLite's virtual machine that a query may take: about a second. A limit in instructions and not on the
clock, so that a query that ends on one machine ends on all, and a reward computed again is the same."""
CHECK_EVERY = 100_000
MAX_COLUMNS_TRIED = 6
"""Columns of a result whose order is looked for (720 orders); beyond, the order must agree."""

ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
"""No ATTACH, which would create files, no PRAGMA, no writing."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    """The result of a query: rows, or the database's own error message."""

    rows: list[Row] = field(default_factory=list)
    error: str = ""

    @property
    def is_empty(self) -> bool:
        """No rows, or nothing in them."""
        return all(value is None for row in self.rows for value in row)


class Database:
    """One SQLite file, for select queries only. Close it, or use it as a context manager."""

    def __init__(self, path: str | Path) -> None:
        """`path`: an existing file; sqlite3.OperationalError where there is none."""
        self._connection = sqlite3.connect(
            f"{Path(path).resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False
        )
        self._connection.text_factory = _text  # real databases hold bytes that are no UTF-8
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
        self._connection.set_authorizer(_authorize)
        self._checks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()

    def run(self, query: str) -> Result:
        """At most 3,000 rows, floats to four decimals; every mistake of the query is an error text, never an exception."""
        self._checks = 0
        self._connection.set_progress_handler(self._is_over, CHECK_EVERY)
        try:
            rows = self._connection.execute(query).fetchmany(MAX_ROWS)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            return Result(error="the query takes too long" if str(error) == "interrupted" else str(error))
        return Result([tuple(round(value, 4) if isinstance(value, float) else value for value in row) for row in rows])

    def _is_over(self) -> bool:
        self._checks += 1
        return self._checks * CHECK_EVERY >= LIMIT_STEPS


def same_answer(rows: list[Row], gold: list[Row], ordered: bool) -> bool:
    """Execution match: the same rows, in the same order where the question asks for one, columns in any order.

    >>> same_answer([(1, "a"), (2, "b")], [("b", 2), ("a", 1)], ordered=False)
    True
    >>> same_answer([(1, "a"), (2, "b")], [("b", 2), ("a", 1)], ordered=True)
    False
    """
    if len(rows) != len(gold) or (rows and len(rows[0]) != len(gold[0])):
        return False
    if rows == gold or not rows:
        return True
    width = len(gold[0])
    wanted = Counter(gold)
    for order in permutations(range(width)) if width <= MAX_COLUMNS_TRIED else [tuple(range(width))]:
        arranged = [tuple(row[index] for index in order) for row in rows]
        if arranged == gold or (not ordered and Counter(arranged) == wanted):
            return True
    return False


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "ignore")


def _authorize(action: int, *_: object) -> int:
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY
