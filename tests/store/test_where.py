"""The filter language: what is understood, what is said of mistakes, and that databases and Python understand the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_server import PostgresServer
from sqlalchemy import Connection, create_engine, insert, text

from agentlightning.errors import InputError
from agentlightning.store.sql import tables
from agentlightning.store.sql.summaries import read_summaries
from agentlightning.store.summaries import (
    SUMMARIES,
    RolloutSummary,
    SummaryQuery,
    check_query,
    first_rows,
    is_after,
    page_of,
)
from agentlightning.store.where import AGENT, FIELDS, AllOf, AnyOf, Comparison, Filter, Not, matches, parse

RUNS = ("one", "two")
NAMES = ("writer", "reader", 'w"riter', "a,b", "é[", "writer's")
TEXTS = ("", "writer", "WRITER", "it's", "100%_", "é", "a\\b", '"', "[1]")
REWARDS = (None, 0.0, -0.0, 0.2, 1.0, 1 / 3, -2.5, 1e300)
COUNTS = (0, 1, 2, 50, 2**40)

A_ROW = RolloutSummary(
    id="",
    run_id="one",
    mode="train",
    step=0,
    state="succeeded",
    group_id="",
    replica=0,
    task_key="",
    title="",
    reward=None,
    turns=0,
    prompt_tokens=0,
    sampled_tokens=0,
    forks=0,
    agents=[],
    attempts=1,
    lost=0,
    refused=False,
    cause=None,
    failure=None,
    outcome=None,
    created_ns=1,
    finished_ns=1,
    finished_seq=1,
    duration_s=0.0,
)


def test_a_filter_combines_comparisons_by_precedence() -> None:
    writer, low = Comparison("agent", "=", ("writer",)), Comparison("reward", "<", (0.2,))
    assert parse("reward < 0.2 and not agent = 'writer' or step > 50") == AnyOf(
        (AllOf((low, Not(writer))), Comparison("step", ">", (50,)))
    )
    assert parse("REWARD".lower() + " < .2 AND (agent = 'writer' OR step > 50)") == AllOf(
        (low, AnyOf((writer, Comparison("step", ">", (50,)))))
    )
    assert parse("title ~ 'it''s' and failure is not null and mode not in ('eval')") == AllOf(
        (
            Comparison("title", "~", ("it's",)),
            Not(Comparison("failure", "is null", ())),
            Not(Comparison("mode", "in", ("eval",))),
        )
    )
    assert parse(" ") == AllOf(())


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("rewrad < 1", r"expected a field \(agent, id, .*reward.*\) at position 1, got 'rewrad'"),
        ("reward <", "reward: expected a number at position 9, got the end"),
        ("reward < '1'", "reward: expected a number at position 10, got \"'1'\""),
        ("step > 1 and reward ~ 'x'", "reward: expected one of = != < <= > >=, in, is at position 21, got '~'"),
        ("agent < 'x'", "agent: expected one of = !=, in at position 7, got '<'"),
        ("title = x", "title: expected text in single quotes at position 9, got 'x'"),
        ("title = 'x", 'title: expected text in single quotes at position 9, got "\'"'),
        ("state = 'done'", "state: expected one of queued, running, succeeded, failed, cancelled at position 9"),
        ("refused = 1", "refused: expected true or false at position 11, got '1'"),
        ("(step = 1", r"expected '\)' at position 10, got the end"),
        ("step = 1 step = 2", "expected 'and', 'or' or the end at position 10, got 'step'"),
        ("step in ()", r"step: expected a number at position 10, got '\)'"),
        ("step is 3", "step: expected 'null' at position 9, got '3'"),
        ("reward < 1e999", "reward: expected a number of at most 64 bits at position 10"),
        ("title ~ ''", "title: expected text of at least one character, and no NUL at position 9"),
        (
            "(" * 60 + "step = 1" + ")" * 60,
            "expected at most 50 parentheses and 'not' within each other at position 52",
        ),
        (" or ".join(["step = 1"] * 101), "step: expected at most 100 comparisons"),
        (f"step in ({', '.join(['1'] * 1001)})", "step: expected at most 1000 values"),
        ("x" * 70_000, "expected at most 65536 characters, got 70000"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_field_and_the_position(where: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse(where)


def test_what_has_no_value_is_neither_less_nor_not_less() -> None:
    for where in ("reward < 1", "not reward < 1", "reward != 1", "reward in (1, 2)"):
        assert matches(parse(where), A_ROW) is None
    assert matches(parse("reward is null or reward < 1"), A_ROW) is True
    assert matches(parse("reward < 1 and step = 7"), A_ROW) is False


def written(tree: Filter) -> str:
    """The filter as text."""
    if isinstance(tree, Not):
        return f"not ({written(tree.part)})"
    if isinstance(tree, Comparison):
        values = [_written(value) for value in tree.values]
        listed = f"({', '.join(values)})" if tree.sign == "in" else "".join(values)
        return f"{tree.field} {tree.sign} {listed}"
    return (" and " if isinstance(tree, AllOf) else " or ").join(f"({written(part)})" for part in tree.parts)


def _written(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower()


@st.composite
def comparisons(draw: st.DrawFn) -> Comparison:
    name = draw(st.sampled_from(sorted(FIELDS)))
    kind, allowed = FIELDS[name]
    values: Any = {
        str: st.sampled_from(allowed or NAMES + TEXTS + RUNS),
        int: st.sampled_from((*COUNTS, -1, 0.5, 49.5)),
        float: st.sampled_from([value for value in REWARDS if value is not None] + [0.3]),
        bool: st.booleans(),
    }[kind]
    sign = draw(st.sampled_from(("=", "!=") if name == AGENT or kind is bool else ("=", "!=", "<", "<=", ">", ">=")))
    sign = draw(
        st.sampled_from([sign, sign, "in", *(["is null"] if name != AGENT else []), *(["~"] if kind is str else [])])
    )
    if sign == "~" and (name == AGENT or allowed):
        sign = "="
    if sign == "~":
        values = values.filter(bool)
    many = draw(st.lists(values, min_size=1, max_size=3 if sign == "in" else 1))
    return Comparison(name, sign, () if sign == "is null" else tuple(many))


FILTERS: st.SearchStrategy[Filter] = st.recursive(
    comparisons(),
    lambda inner: st.one_of(
        inner.map(Not),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: AllOf(tuple(parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: AnyOf(tuple(parts))),
    ),
    max_leaves=5,
)
ROWS = st.builds(
    replace,
    st.just(A_ROW),
    run_id=st.sampled_from(RUNS),
    mode=st.sampled_from(("train", "eval")),
    state=st.sampled_from(("succeeded", "failed", "cancelled")),
    step=st.sampled_from(COUNTS[:4]),
    reward=st.sampled_from(REWARDS),
    turns=st.sampled_from(COUNTS[:4]),
    sampled_tokens=st.sampled_from(COUNTS),
    agents=st.lists(st.sampled_from(NAMES), unique=True, max_size=3).map(sorted),
    title=st.sampled_from(TEXTS),
    task_key=st.sampled_from(TEXTS),
    group_id=st.sampled_from(TEXTS),
    refused=st.booleans(),
    failure=st.sampled_from((None, *TEXTS)),
    outcome=st.sampled_from((None, "trained", "stale")),
    finished_ns=st.sampled_from(COUNTS),
    duration_s=st.sampled_from((0.0, 0.3, 1e9)),
)


@given(FILTERS)
def test_a_filter_that_is_written_is_read_as_it_was(tree: Filter) -> None:
    assert matches(parse(written(tree)), A_ROW) == matches(tree, A_ROW)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A database with the tables and no rows, whose foreign keys are not looked at."""
    if request.param == "sqlite":
        engine = create_engine("sqlite://")
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        engine = create_engine(server.url().replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        tables.metadata.create_all(connection)
        if request.param == "postgres":
            connection.execute(text("SET session_replication_role = replica"))
        connection.execute(insert(tables.runs), [_run(run_id) for run_id in RUNS])
        connection.commit()
        yield connection
    engine.dispose()


def _run(run_id: str) -> dict[str, Any]:
    values = {"state": "running", "config": "{}", "summary": "{}", "created_ns": 1, "updated_ns": 1}
    return {"id": run_id, "name": run_id, **values}


@contextmanager
def holding(database: Connection, rows: list[RolloutSummary]) -> Iterator[None]:
    if rows:
        database.execute(insert(tables.rollout_summaries), [SUMMARIES.columns(row) for row in rows])
    try:
        yield
    finally:
        database.rollback()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(ROWS, max_size=12),
    tree=st.one_of(FILTERS, st.just(AllOf(()))),
    run_id=st.sampled_from((*RUNS, None)),
    order_by=st.sampled_from(("finished", "reward", "step", "turns", "sampled_tokens", "duration")),
    descending=st.booleans(),
    limit=st.integers(1, 5),
)
def test_databases_page_through_what_python_finds(
    database: Connection,
    rows: list[RolloutSummary],
    tree: Filter,
    run_id: str | None,
    order_by: Any,
    descending: bool,
    limit: int,
) -> None:
    places = {name: count(1) for name in RUNS}
    rows = [replace(row, id=f"id{n}", finished_seq=next(places[row.run_id])) for n, row in enumerate(rows)]
    query = SummaryQuery(run_id=run_id, where=written(tree), order_by=order_by, descending=descending, limit=limit)
    mine = [row for row in rows if row.run_id == (run_id or row.run_id) and matches(tree, row)]
    expected = first_rows(mine, query, len(rows))
    found: list[RolloutSummary] = []
    with holding(database, rows):
        while True:
            place = check_query(query)
            page = page_of(read_summaries(database, query, parse(query.where), place), query)
            assert page.rows == first_rows([row for row in mine if is_after(row, place, query)], query, limit)
            found += page.rows
            if page.next is None:
                break
            query = replace(query, after=page.next)
    assert found == expected
