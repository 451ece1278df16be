"""The text-to-SQL example's own parts, without a trainer: database, names, data, demonstrations, and the team of agents."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripted import run_agent

EXAMPLE = "text_to_sql"

Module = Callable[[str], ModuleType]


QUESTIONS = [
    ("How many heads of the departments are older than 56 ?", "SELECT count(*) FROM head WHERE age > 56"),
    ("List the name and age of the heads, ordered by age.", "SELECT name , age FROM head ORDER BY age"),
    ('Who was born in "New York"?', "SELECT T1.name FROM head AS T1 WHERE T1.born_state = 'New York'"),
    ("Names of heads of departments?", "SELECT name FROM head JOIN department ON head.id = department.head_id"),
    ("Who is older than 200?", "SELECT name FROM head WHERE age > 200"),
]


@pytest.fixture
def spider_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database and questions in the published archive's own layout."""
    folder = tmp_path / "spider" / "database" / "offices"
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "offices.sqlite")) as connection:
        connection.executescript(
            "create table head (id int, name text, born_state varchar(20), age real);"
            "create table department (head_id int references head (id), BudgetInBillions real, opened date);"
            "insert into head values (1, 'Ann Bo', 'New York', 60), (2, 'Cy', 'Ohio', 50), (3, 'Di', 'New York', 57);"
            "insert into department values (1, 2.5, '1990');"
        )
    rows = [{"db_id": "offices", "question": question, "query": query} for question, query in QUESTIONS]
    (tmp_path / "spider" / "train_spider.json").write_text(json.dumps(rows))
    (tmp_path / "spider" / "dev.json").write_text(json.dumps(rows[:1]))
    monkeypatch.setenv("AGL_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def offices(module: Module, spider_root: Path) -> Iterator[Any]:
    with module("database").Database(spider_root / "spider/database/offices/offices.sqlite") as database:
        yield database


def test_a_query_gives_rows_or_the_databases_own_words(offices: Any) -> None:
    assert offices.run("select count(*), avg(age) from head").rows == [(3, 55.6667)]
    assert offices.run("select size from head").error == "no such column: size"
    assert "syntax error" in offices.run("selec 1").error


@pytest.mark.parametrize(
    "query",
    [
        "insert into head values (4, 'x', 'y', 1)",
        "drop table head",
        "attach 'other.sqlite' as other",
        "pragma user_version = 3",
        "select 1; select 2",
        "",
    ],
)
def test_anything_but_one_select_changes_nothing_and_gives_nothing(offices: Any, spider_root: Path, query: str) -> None:
    before = sorted(path.name for path in spider_root.rglob("*"))
    assert offices.run(query).rows == []
    assert offices.run("select count(*) from head").rows == [(3,)]
    assert sorted(path.name for path in spider_root.rglob("*")) == before


def test_a_query_that_never_ends_is_an_error_and_the_next_one_works(offices: Any) -> None:
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select sum(i) from n"
    assert offices.run(endless).error == "the query takes too long"
    assert offices.run("select 1").rows == [(1,)]


@pytest.mark.parametrize(
    ("rows", "gold", "ordered", "same"),
    [
        ([(1,), (2,)], [(2,), (1,)], False, True),
        ([(1,), (2,)], [(2,), (1,)], True, False),
        ([(1, "a")], [("a", 1)], True, True),
        ([(1, 2), (3, 4)], [(2, 1), (3, 4)], False, False),  # one order of columns for all rows
        ([(1,)], [(1,), (1,)], False, False),
        ([(1, 1)], [(1,)], False, False),
        ([], [], False, True),
    ],
)
def test_execution_match(
    module: Module, rows: list[tuple[Any, ...]], gold: list[tuple[Any, ...]], ordered: bool, same: bool
) -> None:
    assert module("database").same_answer(rows, gold, ordered) is same


def test_questions_without_an_answer_are_dropped_and_the_slice_is_over_one_table(
    module: Module, spider_root: Path
) -> None:
    assert [question.query for question in module("spider").load("train")] == [query for _, query in QUESTIONS[:4]]

    assert [problem.row["gold"] for problem in module("data").spider_problems("train")] == [
        query for _, query in QUESTIONS[:3]
    ]


def test_data_that_are_nowhere_are_one_clear_sentence(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"spider/database does not exist: unpack spider\.zip"):
        module("data").spider_train()


def test_a_question_is_masked_by_its_database(module: Module, spider_root: Path) -> None:
    spider = module("spider")
    schema = spider.schema(spider.folder() / "database/offices/offices.sqlite")
    masked = module("masking").mask(QUESTIONS[2][0], schema)
    assert masked.question == "who was born ~ C0 in V0 @ C0 ?"
    assert masked.names["C0"] == "[head].[born_state]"
    assert masked.names["V0"] == "'New York'"
    assert masked.schema.startswith("T0 head : C0 born state txt C1 id num")
    assert "budget in billion num" in masked.schema
    assert module("masking").mask("It's 2 or three?", schema).names["V1"] == "3"


def test_real_models_are_shown_the_question_and_the_whole_schema(module: Module, spider_root: Path) -> None:
    rows = module("data").full_train()
    assert [row["question"] for row in rows] == [question for question, _ in QUESTIONS[:4]], "joins too"
    assert "department(head_id" in rows[0]["schema"]
    assert "names" not in rows[0]


def turns(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


async def run_team(solve: Callable[..., Any], task: dict[str, Any], answers: list[str]) -> tuple[Any, list[list[str]]]:
    """The reward of one rollout against scripted answers, and the messages of each request."""
    reward, requests = await run_agent(solve, [{"content": answer} for answer in answers], task)
    assert len(requests) == len(answers), "every scripted answer was asked for"
    return reward, [turns(request["messages"]) for request in requests]


@pytest.mark.parametrize(
    ("answers", "reward", "told"),
    [
        (["select count ( * ) from T0 where C0 > V0", "right"], 1.0, ["one"]),
        (["select count ( * ) from T0", "right"], 0.0, ["one"]),
        (
            ["select C7 from T0", "select count ( * ) from T0 where C0 > V0", "right"],
            1.0,
            ["no such column: C7", "one"],
        ),
        (
            ["select C0 from T0", "wrong", "select count ( * ) from T0 where C0 > V0", "right"],
            1.0,
            ["many", "again", "one"],
        ),
        (["select C0 from T0 where C0 < C0", "wrong", "x", "y"], 0.0, ["empty", "again", 'near "x": syntax error']),
    ],
)
async def test_an_error_goes_to_the_rewriter_and_rows_go_to_the_checker(
    module: Module, spider_root: Path, answers: list[str], reward: float, told: list[str]
) -> None:
    task = {
        "question": "how many T0 are older than V0 ?",
        "schema": "T0 head : C0 age num",
        "database": str(spider_root / "spider/database/offices/offices.sqlite"),
        "gold": QUESTIONS[0][1],
        "ordered": False,
        "names": {"T0": "[head]", "C0": "[head].[age]", "V0": "56"},
    }
    found, requests = await run_team(module("agent").solve, task, answers)
    assert found == reward
    assert requests[0] == ["how many T0 are older than V0 ? schema T0 head : C0 age num"]
    assert requests[-1][2::2] == told
    for earlier, later in pairwise(requests):
        assert later[: len(earlier)] == earlier, "all agents read and write one conversation"


async def test_a_real_model_is_told_its_parts_and_shown_the_rows(module: Module, spider_root: Path) -> None:
    task = module("data").full_train()[1]
    answers = [
        "```sql\nSELECT name FROM head\n```",
        "WRONG: the age is missing.",
        "SELECT age, name FROM head ORDER BY age",
        "RIGHT",
    ]
    reward, requests = await run_team(module("agent").solve_text, task, answers)
    assert reward == 1.0, "columns may come in any order"
    last = requests[-1]
    assert "department(" in last[1]
    assert "Question: List the name and age" in last[1]
    assert last[3].startswith("The database returned:\n3 row(s)\nAnn Bo\nCy\nDi")
    assert last[5].startswith("Rewriter:")


async def test_gold_traces_are_the_teams_own_conversations_and_a_mistake_is_not_imitated(
    module: Module, spider_root: Path
) -> None:
    gold = module("gold_traces")
    right, repaired = await gold.traces(module("agent").solve_text, gold.text_to_sql(random.Random(1)), 2)
    said = [one["content"] for one in right["messages"] if one["role"] == "assistant"]
    assert said[0].startswith("```sql\nSELECT")
    assert said[1:] == ["RIGHT"]
    answers = [one for one in repaired["messages"] if one["role"] == "assistant"]
    assert [one.get("weight", 1) for one in answers] == [0, 1, 1, 1]
    assert [one["content"] for one in answers[1::2]] == ["WRONG", "RIGHT"]
