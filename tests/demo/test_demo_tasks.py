"""Task rows, splits and demonstrators, and the rules of the environments."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.demo import lookup, sql, tasks
from agentlightning.demo.tasks import DemoTask
from agentlightning.errors import InputError

TASKS = [pytest.param(tasks.load(name), id=name) for name in tasks.NAMES]


@pytest.mark.parametrize("task", TASKS)
def test_rows_depend_on_split_and_seed_alone_and_are_json(task: DemoTask):
    rows = tasks.rows(task, "train", 40, seed=7)

    assert rows == tasks.rows(task, "train", 40, seed=7)
    assert rows != tasks.rows(task, "train", 40, seed=8)
    assert rows != tasks.rows(task, "test", 40, seed=7)
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize("task", TASKS)
def test_demonstrations_depend_on_the_seed_alone(task: DemoTask):
    assert tasks.demonstrations(task, 30, seed=1) == tasks.demonstrations(task, 30, seed=1)
    assert tasks.demonstrations(task, 30, seed=1) != tasks.demonstrations(task, 30, seed=2)


def test_no_sql_question_or_database_is_in_both_splits():
    train, test = (tasks.rows(sql, split, 1500, seed=0) for split in ("train", "test"))

    assert {row["question"] for row in train}.isdisjoint(row["question"] for row in test)
    assert {row["database"] for row in train}.isdisjoint(row["database"] for row in test)


def test_no_lookup_question_or_corpus_is_in_both_splits():
    train, test = (tasks.rows(lookup, split, 1500, seed=0) for split in ("train", "test"))

    assert {row["question"] for row in train}.isdisjoint(row["question"] for row in test)
    assert {row["corpus"] for row in train}.isdisjoint(row["corpus"] for row in test)


@pytest.mark.parametrize(("task", "low", "high"), [(sql, 0.20, 0.32), (lookup, 0.22, 0.34)])
def test_the_demonstrator_is_weak_but_not_hopeless(task: DemoTask, low: float, high: float):
    _, success = tasks.demonstrations(task, 1500, seed=0)

    assert low < success < high


@pytest.mark.parametrize("task", TASKS)
def test_the_demonstrator_keeps_to_the_protocol_and_to_the_limit_of_calls(task: DemoTask):
    opening, closing_tag = task.SPECIAL_WORDS
    for conversation in tasks.demonstrations(task, 300, seed=3)[0]:
        roles = [message["role"] for message in conversation]
        *actions, answer = [m["content"] for m in conversation if m["role"] == "assistant"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert len(actions) < task.MAX_CALLS
        assert all(action.startswith(opening) and action.endswith(closing_tag) for action in actions)
        assert answer.startswith("Answer: ")
        assert all(message["content"] for message in conversation)


@pytest.mark.parametrize("task", TASKS)
def test_the_plan_of_a_row_leads_to_its_answer(task: DemoTask):
    for row in tasks.rows(task, "test", 200, seed=4):
        if task is sql:
            with closing(sql.database(row["database"])) as company:
                result = sql.execute(company, sql.write_query(row["plan"], *sql.names(company)))
        else:
            result = row["plan"]["person"]
            for relation in row["plan"]["relations"]:
                result = lookup.find(row["corpus"], f"{result} {relation}")
        assert result == row["answer"]


@given(st.text(max_size=40))
def test_any_query_gets_one_short_reply(query: str):
    with closing(sql.database(3)) as company:
        reply = sql.execute(company, query)

    assert reply
    assert len(reply) <= 12 or query == ".schema"


@pytest.mark.parametrize(
    ("query", "reply"),
    [
        (".schema", "members name city dept age wage"),
        ("select count(*) from members", "16"),
        ("select name from members where name='Ana'", "Ana"),
        ("select name from members where name='Zoe'", "empty"),
        ("select max(age) from members where city='nowhere'", "empty"),
        ("select count(*) from members where city='nowhere'", "empty"),
        ("select ''", "empty"),
        ("select name from staff", "error"),
        ("select name from members; select 1", "error"),
        ("drop table members", "error"),
        ("select 'Ö", "error"),
        ("select zeroblob(1000000000)", "error"),
    ],
)
def test_the_sql_environment_answers(query: str, reply: str):
    number = next(n for n in range(100) if _schema(n) == "members name city dept age wage")
    with closing(sql.database(number)) as company:
        assert sql.execute(company, query) == reply


def test_a_query_cannot_change_a_database():
    with closing(sql.database(0)) as company:
        table = sql.names(company)[0]
        for attack in (f"delete from {table}", f"select 1; drop table {table}", "pragma query_only = 0"):
            assert sql.execute(company, attack) == "error"
        assert sql.execute(company, f"select count(*) from {table}") == "16"


def test_an_endless_query_is_cut_short():
    with closing(sql.database(0)) as company:
        table = sql.names(company)[0]
        aliases = ", ".join(f"{table} t{i}" for i in range(9))

        assert sql.execute(company, f"select count(*) from {aliases}") == "error"


@given(st.integers(0, 2_000_000), st.text(max_size=20))
def test_what_names_no_fact_finds_none(corpus: int, wanted: str):
    words = wanted.split(" ")

    assert lookup.find(corpus, wanted) == "none" or (words[0] in tasks.PEOPLE and words[1] in lookup.VALUES)


def _schema(number: int) -> str:
    with closing(sql.database(number)) as company:
        return sql.execute(company, ".schema")


def test_an_unknown_task_is_refused_with_the_names_there_are():
    with pytest.raises(InputError, match="'chess' is not a demo task; expected one of sql, lookup"):
        tasks.load("chess")
