"""Columns that a process keeps: bounded, and never ahead of the transaction that asks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from sqlalchemy import Connection, create_engine

from agentlightning.store.sql import tables
from agentlightning.store.sql.column_cache import ColumnCache
from agentlightning.store.sql.columns import Columns

RUN = "run", 17


@pytest.fixture
def connection() -> Iterator[Connection]:
    """A database in which no chunk is written."""
    engine = create_engine("sqlite://")
    tables.summary_chunks.create(engine)
    with engine.connect() as opened:
        yield opened
    engine.dispose()


def a_cache() -> ColumnCache:
    """Two columns of four rows."""
    cache = ColumnCache()
    cache.put((*RUN, "finished_seq"), 1, np.array([1, 2, 3, 4], "<i2"))
    cache.put((*RUN, "reward"), 1, np.array([0.1, 0.2, 0.3, 0.4]))
    return cache


def test_columns_that_were_read_for_longest_make_place_for_others() -> None:
    cache = ColumnCache(max_bytes=20)
    for name in ("reward", "turns"):
        cache.put((*RUN, name), 1, np.zeros(8, "i1"))
    assert cache.get((*RUN, "reward"))[0] == 1
    cache.put((*RUN, "step"), 2, np.zeros(8, "i1"))
    assert [cache.get((*RUN, name))[0] for name in ("reward", "turns", "step")] == [1, 0, 2]


def test_a_column_that_grew_counts_once() -> None:
    cache = ColumnCache(max_bytes=20)
    cache.put((*RUN, "reward"), 1, np.zeros(8, "i1"))
    for chunks, rows in ((1, 8), (2, 10), (3, 12)):
        cache.put((*RUN, "step"), chunks, np.zeros(rows, "i1"))
    assert cache.get((*RUN, "reward"))[0] == 1
    assert cache.get((*RUN, "step"))[0] == 3


def test_a_column_larger_than_the_cache_is_not_kept() -> None:
    cache = ColumnCache(max_bytes=20)
    cache.put((*RUN, "reward"), 1, np.zeros(21, "i1"))
    assert cache.get((*RUN, "reward")) == (0, None)


def test_rows_that_a_transaction_does_not_know_yet_are_left_out(connection: Connection) -> None:
    columns = Columns(connection, RUN, {"reward"}, 3, a_cache())
    assert (columns.rows, columns.last) == (3, 3)
    assert columns["reward"].tolist() == [0.1, 0.2, 0.3]


def test_a_run_that_was_made_again_under_its_id_is_another(connection: Connection) -> None:
    assert Columns(connection, ("run", 18), {"reward"}, 4, a_cache()).rows == 0


def test_outcomes_which_change_are_not_kept(connection: Connection) -> None:
    cache = a_cache()
    cache.put((*RUN, "outcome"), 1, np.zeros(4, "<i8"))
    assert Columns(connection, RUN, {"outcome"}, 4, cache).rows == 0
