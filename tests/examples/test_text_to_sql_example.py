"""The text-to-SQL example's own parts, without a trainer: database, names, data, demonstrations, and the team of agents."""

from __future__ import annotations

import importlib
import json
import random
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import run_agent

from agentlightning.records import Call, Sampling
from agentlightning.runner.result import RolloutResult

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_to_sql"
MODULES = ("agent", "data", "database", "masking", "rules", "scoring", "spider", "warm_start")

Module = Callable[[str], ModuleType]


@pytest.fixture(scope="module", autouse=True)
def _example_on_the_path() -> Iterator[None]:
    """The example's files are scripts, not a package: they are importable for these tests only."""
    forget()
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))
    forget()


def forget() -> None:
    """Examples have files of the same names."""
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def module() -> Module:
    return importlib.import_module


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


def test_a_query_returns_no_more_rows_than_the_limit(module: Module, offices: Any) -> None:
    many = "with recursive n(i) as (select 1 union all select i + 1 from n limit 9000) select i from n"
    assert len(offices.run(many).rows) == module("database").MAX_ROWS


def test_a_database_that_does_not_exist_is_not_made(module: Module, tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError):
        module("database").Database(tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()


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


@settings(deadline=None)  # the first call imports the example
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), max_size=6), st.randoms())
def test_rows_match_themselves_in_any_order_of_rows_and_columns(
    rows: list[tuple[int, ...]], rng: random.Random
) -> None:
    same_answer = importlib.import_module("database").same_answer
    order = rng.sample(range(3), 3)
    columns_moved = [tuple(row[index] for index in order) for row in rows]
    assert same_answer(columns_moved, rows, ordered=True)
    assert same_answer(rng.sample(columns_moved, len(rows)), rows, ordered=False)


def test_questions_without_an_answer_are_dropped(module: Module, spider_root: Path) -> None:
    assert [question.query for question in module("spider").load("train")] == [query for _, query in QUESTIONS[:4]]


def test_only_questions_over_one_table_are_in_the_slice(module: Module, spider_root: Path) -> None:
    assert [problem.row["gold"] for problem in module("data").spider_problems("train")] == [
        query for _, query in QUESTIONS[:3]
    ]


@pytest.mark.parametrize(
    ("query", "single"),
    [
        ("select a from t where b = 'a, b join c select'", True),
        ("select a from t, u", False),
        ("select a from t where b = (select max(b) from t)", False),
        ("select a from t union select a from u", False),
    ],
)
def test_one_select_from_one_table(module: Module, query: str, single: bool) -> None:
    assert module("spider").is_single_table(query) is single


def test_an_order_inside_of_brackets_is_none_of_the_answer(module: Module) -> None:
    spider = module("spider")
    inner = "select a from (select a from t order by b limit 3)"
    assert not spider.Question("", inner, Path()).ordered
    assert spider.Question("", "select a from t where b in (1) ORDER  BY a", Path()).ordered


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


def test_gold_queries_in_short_names_give_the_gold_rows(module: Module, spider_root: Path) -> None:
    count, listed, born = module("data").spider_problems("train")
    assert count.program == "select count ( * ) from T1 where C6 > V0"
    assert listed.program == "select C0 , C1 from T0 order by C1 asc"
    assert born.program is not None
    names = module("masking").mask(QUESTIONS[0][0], module("spider").schema(Path(count.row["database"]))).names
    assert module("masking").mask_query("select age from head where age > 12", names) is None, (
        "12 is not in the question"
    )


def test_renumbering_changes_no_meaning(module: Module, spider_root: Path) -> None:
    data, masking, agent = module("data"), module("masking"), module("agent")
    for problem in data.spider_problems("train"):
        for seed in range(20):
            drawn = masking.renumber(problem.row["names"], random.Random(seed))
            assert len(set(drawn.values())) == len(drawn)
            names = {drawn[name]: real for name, real in problem.row["names"].items()}
            moved = masking.renamed(problem.program, drawn)
            assert agent.with_real_names(moved, names) == agent.with_real_names(problem.program, problem.row["names"])


JOINED = [
    "SELECT T1.name , count(*) FROM department AS T2 JOIN head AS T1 ON T2.head_id = T1.id GROUP BY T1.name",
    "SELECT name FROM head JOIN department ON head.id = department.head_id WHERE age > 56",
    "SELECT name FROM head JOIN department ON head.age = department.head_id",
    "SELECT * FROM head JOIN department ON head.id = department.head_id",
]


def joined(module: Module, root: Path) -> list[Any]:
    """The problems of questions over two tables."""
    database = root / "spider/database/offices/offices.sqlite"
    text = "How many heads of departments are older than 56, by name and head id?"
    spider = module("spider")
    return list(module("data").problems_of([spider.Question(text, query, database) for query in JOINED], joins=True))


def test_two_tables_that_a_key_joins_have_a_name(module: Module, spider_root: Path) -> None:
    counted, older, no_key, everything = joined(module, spider_root)
    assert counted.row["names"]["J0"] == "[department] join [head] on [department].[head_id] = [head].[id]"
    assert counted.row["schema"].split(" J0 ")[1] in (": T0 T1", ": T1 T0")
    name, age = (
        next(short for short, real in older.row["names"].items() if real == f"[head].[{column}]")
        for column in ("name", "age")
    )
    assert counted.program == f"select {name} , count ( * ) from J0 group by {name}"
    assert older.program == f"select {name} from J0 where {age} > V0"
    assert no_key.program is None
    assert everything.program is None, "a star means other columns in another order of tables"


def test_questions_over_one_table_are_shown_as_before(module: Module, spider_root: Path) -> None:
    assert all("J0" not in problem.row["names"] for problem in module("data").spider_problems("train"))
    (two,) = module("data").joins_problems("train")
    assert two.row["gold"] == QUESTIONS[3][1]
    assert len(module("data").joins_train()) == 3


def test_a_mistake_that_the_checker_notices_is_not_imitated(module: Module, spider_root: Path) -> None:
    warm_start = module("warm_start")
    problem = joined(module, spider_root)[1]
    tokenizer = warm_start.joins_tokenizer([problem, problem], random.Random(0))
    shown, repaired = set(), 0
    for seed in range(60):
        messages = warm_start.demonstrate_joins(problem, random.Random(seed))
        tokens, mask = warm_start.encode_right(tokenizer, messages)
        assert tokenizer.unk_token_id not in [token for token, own in zip(tokens, mask, strict=True) if own]
        own = tokenizer.decode([token for token, mine in zip(tokens, mask, strict=True) if mine]).split("<|end|>")[:-1]
        said = [message for message in messages if message["role"] == "assistant"]
        assert [text.strip() for text in own] == [one["content"] for one in said if "mistake" not in one]
        shown |= {message["content"] for message in messages[2::2]}
        repaired += said[-1]["content"] == "right" and any("mistake" in one for one in said)
    assert repaired > 5
    assert {"one txt", "again"} <= shown


@pytest.mark.parametrize(
    ("rows", "preview"),
    [
        ([("Ann", 3), ("Bo", 2)], "many txt num"),
        ([("Ann",), ("Ann",)], "many txt twice"),
        ([(None,)], "empty null"),
        ([], "empty"),
        ([tuple(range(20))], "one num num num num num num"),
    ],
)
def test_the_checker_sees_the_kinds_of_what_came_back(module: Module, rows: list[Any], preview: str) -> None:
    assert module("agent").in_kinds(module("database").Result(rows)) == preview


@pytest.mark.parametrize(
    ("said", "reward", "repaired", "broken", "steps"),
    [
        ("writer right, checker", 1, 0, 0, [1, 0]),
        ("writer wrong, checker", 0, 0, 0, [0, 0]),
        ("writer wrong, checker, rewriter right, checker", 1, 1, 0, [0, 0, 1, 0]),
        ("writer right, checker, rewriter wrong, rewriter right", 1, 0, 0, [1, 0, -1, 1]),
        ("writer right, checker, rewriter wrong, checker", 0, 0, 1, [1, 0, -1, 0]),
    ],
)
def test_a_repair_is_a_reward_of_the_rewriter_and_steps_add_up(
    module: Module, spider_root: Path, said: str, reward: int, repaired: int, broken: int, steps: list[int]
) -> None:
    row = joined(module, spider_root)[1].row
    queries = {"right": joined(module, spider_root)[1].program, "wrong": "select C9 from J0", "": "wrong"}
    calls = [recorded(one, queries) for one in said.split(", ")]
    scored = module("scoring").joins(row, RolloutResult(calls=calls))
    assert scored == {"reward": reward, "repaired": repaired, "broken": broken, "steps": steps}


def recorded(said: str, contents: dict[str, str]) -> Call:
    """A recorded call: "writer right"."""
    agent, _, kind = said.partition(" ")
    return Call(
        id=said,
        run_id="run",
        rollout_id="r",
        attempt=1,
        agent=agent,
        parent_id=None,
        suffix_ids=[],
        sampled_ids=[],
        logprobs=[],
        versions=[],
        prompt_tokens=0,
        policy="",
        model="m",
        protocol="chat",
        sampling=Sampling(),
        history_hash="",
        request_hash="",
        messages=[],
        completion={"role": "assistant", "content": contents[kind]},
    )


async def test_the_team_over_joined_tables_shows_its_checker_what_came_back(module: Module, spider_root: Path) -> None:
    problem = joined(module, spider_root)[1]
    answers = ["select C9 from J0", "select count ( * ) from J0", "wrong", problem.program]
    words, requests = await run_team(module("agent").solve_joins, problem.row, answers)
    assert words == "1 row(s)\nAnn Bo"
    assert requests[-1][2::2] == ["no such column: C9", "one num", "again"]


def test_errors_of_the_database_come_back_in_the_models_names(module: Module, offices: Any) -> None:
    agent = module("agent")
    names = {"T0": "[head]", "T1": "[department]", "C0": "[head].[age]", "C1": "[department].[head_id]"}
    error = offices.run(agent.with_real_names("select C1 from T0", names)).error
    assert error == "no such column: department.head_id"
    assert agent.with_short_names(error, names) == "no such column: C1"
    assert offices.run(agent.with_real_names("select C9 from T0", names)).error == "no such column: C9"


def test_like_looks_for_the_value_anywhere(module: Module, offices: Any) -> None:
    names = {"T0": "[head]", "C0": "[head].[name]", "V0": "'n'"}
    query = module("agent").with_real_names("select C0 from T0 where C0 like V0", names)
    assert offices.run(query).rows == [("Ann Bo",)]


@pytest.mark.parametrize(
    ("reply", "query"),
    [
        ("select 1", "select 1"),
        ("```sql\nselect 1;\n```", "select 1"),
        ("First ```select 2```, better:\n```\nselect\n 3 ;\n```\nDone.", "select\n 3"),
        ("", ""),
    ],
)
def test_a_query_is_read_out_of_a_reply(module: Module, reply: str, query: str) -> None:
    assert module("agent").query_in(reply) == query


@pytest.mark.parametrize(
    ("verdict", "refused"), [("wrong", True), ("**WRONG**: no", True), ("right", False), ("", False)]
)
def test_a_verdict_is_its_first_word(module: Module, verdict: str, refused: bool) -> None:
    assert module("agent").is_refusal(verdict) is refused


def test_training_rows_blank_words_but_no_names(module: Module, spider_root: Path) -> None:
    data = module("data")
    rows = data.spider_train(seed=1, epochs=4, blanks=0.5)
    assert len(rows) == 12
    assert rows == data.spider_train(seed=1, epochs=4, blanks=0.5) != data.spider_train(seed=2, epochs=4, blanks=0.5)
    assert any("_" in row["question"] for row in rows)
    assert data.blank_words("how many T0 are ~ C1 V0 ?", 1.0, random.Random(0)) == "_ _ T0 _ ~ C1 V0 ?"
    assert all("_" not in row["question"] for row in data.spider_heldout())


def test_real_models_are_shown_the_question_and_the_whole_schema(module: Module, spider_root: Path) -> None:
    rows = module("data").spider_full_train()
    assert [row["question"] for row in rows] == [question for question, _ in QUESTIONS[:4]], "joins too"
    assert "CREATE TABLE department (head_id int" in rows[0]["schema"].replace("create table", "CREATE TABLE")
    assert "names" not in rows[0]


def test_generated_rows_have_databases_of_their_own_for_training_and_for_the_rest(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = module("data")
    rows = data.generated_heldout()
    names = {Path(row["database"]).stem for row in rows}
    assert names <= {f"{number:03}" for number in range(100, 150)}
    with module("database").Database(rows[0]["database"]) as database:
        assert not database.run(rows[0]["gold"]).error
        assert not database.run(f"select * from {rows[0]['schema'].split()[0]}").is_empty
    assert data.generated_heldout() == rows


def turns(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_demonstrations_show_writer_checker_and_rewriter(module: Module, spider_root: Path) -> None:
    warm_start, data = module("warm_start"), module("data")
    problem = data.spider_problems("train")[0]
    seen = [turns(warm_start.demonstrate_spider(problem, random.Random(seed))) for seed in range(300)]
    assert all(len(said) % 2 == 0 and said[1].startswith("select") for said in seen)
    assert all(said[-1] == "right" for said in seen), "the checker has the last word after at most two queries"
    assert any(said[2] == "one" and said[3] == "right" and len(said) == 4 for said in seen)
    assert any(said[2].startswith("no such column: C") and said[3].startswith("select") for said in seen)
    assert len({said[0] for said in seen}) > 250, "names and blanks are drawn each time"


def test_a_mistake_changes_one_word_to_another_of_its_kind(module: Module) -> None:
    query = "select max ( C0 ) from T0 where C1 > V0"
    for seed in range(50):
        wrong = module("warm_start").with_mistake(query, ["C0", "C1", "C2", "T0", "T1", "V0"], random.Random(seed))
        changed = [(a, b) for a, b in zip(query.split(), wrong.split(), strict=True) if a != b]
        assert len(changed) == 1
        ((before, after),) = changed
        assert before[0] == after[0] or {before, after} <= {"max", "min", "avg", "sum", ">", "<", ">=", "<=", "=", "!="}


def test_the_words_of_the_protocol_are_single_tokens(module: Module, spider_root: Path) -> None:
    warm_start, data = module("warm_start"), module("data")
    tokenizer = warm_start.spider_tokenizer(data.spider_problems("train"), random.Random(0))
    said = "select count ( * ) from T0 where C13 >= V0"
    assert len(tokenizer.encode(said)) == len(said.split())
    assert tokenizer.decode(tokenizer.encode(said)) == said
    assert tokenizer.unk_token_id not in tokenizer.encode(
        "no such column: C1 near : syntax error empty one many right wrong"
    )
    problem = data.spider_problems("train")[0]
    messages = warm_start.demonstrate_spider(problem, random.Random(0))
    tokens, mask = warm_start.encode(tokenizer, messages)
    written = tokenizer.decode([token for token, own in zip(tokens, mask, strict=True) if own])
    assert written.count("<|end|>") == len(messages) // 2
    assert messages[1]["content"] in written


def test_rules_copy_the_program_of_the_most_similar_question(module: Module, spider_root: Path) -> None:
    rules = module("rules")
    count, listed, born = module("data").spider_problems("train")
    assert rules.nearest_neighbour([count, listed], [count, listed]) == 1.0
    assert rules.nearest_neighbour([count, listed], [born]) == 0.0
    assert rules.answers(listed, "select C1 , C0 from T0 order by C1 asc")
    assert not rules.answers(listed, "select C1 , C9 from T0 order by C1 asc")


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
    task = module("data").spider_full_train()[1]
    answers = [
        "```sql\nSELECT name FROM head\n```",
        "WRONG: the age is missing.",
        "SELECT age, name FROM head ORDER BY age",
        "RIGHT",
    ]
    reward, requests = await run_team(module("agent").solve_text, task, answers)
    assert reward == 1.0, "columns may come in any order"
    last = requests[-1]
    assert "table department" in last[1].lower()
    assert "Question: List the name and age" in last[1]
    assert last[3].startswith("The database returned:\n3 row(s)\nAnn Bo\nCy\nDi")
    assert last[5].startswith("Rewriter:")
