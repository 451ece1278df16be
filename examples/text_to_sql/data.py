"""Questions over databases: generated companies (the default), and Spider's questions over one table.

A row is what the agent gets: `question` and `schema` as the model is shown them, `database` (a file), `gold` and `ordered`.
"""

from __future__ import annotations

import os
import random
import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import masking
import spider
from agent import with_real_names
from database import Database, same_answer

from agentlightning.demo import sql as company

Row = dict[str, Any]

STEPS, TASKS_PER_STEP = 24, 64
"""Of train.toml: no generated question is asked twice."""
HELD_OUT = 300
HELD_OUT_SEED = 12345
"""The same held-out questions for every seed."""
DATABASES = Path("runs/text_to_sql-databases")


def generated_train(seed: int = 0) -> list[Row]:
    """Questions over databases 0 to 99."""
    rng = random.Random(f"train {seed}")
    return [generated(company.sample(rng, "train")) for _ in range(STEPS * TASKS_PER_STEP)]


def generated_heldout() -> list[Row]:
    """Other questions, over databases 100 to 149."""
    rng = random.Random(f"held out {HELD_OUT_SEED}")
    return [generated(company.sample(rng, "test")) for _ in range(HELD_OUT)]


def generated(task: dict[str, Any]) -> Row:
    """The row of a task of `agentlightning.demo.sql`."""
    path = _database(task["database"])
    with closing(company.database(task["database"])) as connection:
        table, pay = company.names(connection)
        columns = company.columns(connection, table)
    return {
        "question": task["question"],
        "schema": " ".join([table, *columns]),
        "database": str(path),
        "gold": query(task["plan"], table, pay),
        "ordered": False,
    }


def query(plan: dict[str, Any], table: str, pay: str) -> str:
    """The query of a plan; one row where the question is who is first."""
    return company.write_query(plan, table, pay) + (" limit 1" if plan["order"] else "")


def spider_train(seed: int = 0, epochs: int = 3, blanks: float = 0.1) -> list[Row]:
    """Training questions over one table for some epochs, each with other words blanked out."""
    return training_rows(spider_problems("train"), seed, epochs, blanks)


def training_rows(problems: list[Problem], seed: int, epochs: int = 3, blanks: float = 0.1) -> list[Row]:
    rng = random.Random(f"train {seed}")
    rows = []
    for _ in range(epochs):
        for problem in rng.sample(problems, len(problems)):
            rows.append(problem.row | {"question": blank_words(problem.row["question"], blanks, rng)})
    return rows


def spider_heldout() -> list[Row]:
    """All questions over one table of the 20 databases that no training question is about."""
    return [problem.row for problem in spider_problems("dev")]


def joins_train(seed: int = 0) -> list[Row]:
    """Training questions over two tables, each with other words blanked out."""
    return training_rows(joins_problems("train"), seed)


def joins_heldout() -> list[Row]:
    """All questions over two tables of the 20 databases that no training question is about."""
    return [problem.row for problem in joins_problems("dev")]


def readable_train() -> list[Row]:
    """The training questions over one table as they are, with the whole schema, for models that read."""
    return [row for row in full_train() if spider.is_single_table(row["gold"])]


def readable_heldout() -> list[Row]:
    """All questions over one table of the 20 databases that no training question is about; the first ones are a sample."""
    rows = [_readable(question) for question in spider.load("dev") if spider.is_single_table(question.query)]
    return random.Random(0).sample(rows, len(rows))


def full_train() -> list[Row]:
    """All of Spider's training questions, joins and nesting too."""
    return [_readable(question) for question in spider.load("train")]


def full_heldout() -> list[Row]:
    return [_readable(question) for question in spider.load("dev")]


@dataclass(frozen=True)
class Problem:
    row: Row
    program: str | None
    """The gold query in the row's short names; None where it cannot be written in them, or would give something else."""


def spider_problems(split: spider.Split) -> list[Problem]:
    return problems_of(spider.load(split))


def joins_problems(split: spider.Split) -> list[Problem]:
    return problems_of(spider.load(split), joins=True)


def problems_of(questions: Iterable[spider.Question], joins: bool = False) -> list[Problem]:
    """The questions whose query is one select from one table, or with joins from two, as the tiny model is shown them."""
    wanted = spider.is_two_tables if joins else spider.is_single_table
    schemas: dict[Path, spider.Schema] = {}
    problems = []
    for question in questions:
        if not wanted(question.query):
            continue
        path = question.database
        if path not in schemas:
            schemas[path] = spider.schema(path)
        masked = masking.mask(question.text, schemas[path], joins)
        row = _row(question, masked.question, masked.schema) | {"names": masked.names}
        program = masking.mask_query(question.query, masked.names)
        problems.append(Problem(row, program if program and _is_right(row, program) else None))
    return problems


def blank_words(question: str, share: float, rng: random.Random) -> str:
    """The question with a share of its words, never its names, replaced by a blank."""

    def blank(match: re.Match[str]) -> str:
        return "_" if rng.random() < share else match[0]

    return re.sub(r"\b[a-z]+\b", blank, question)


def _is_right(row: Row, program: str) -> bool:
    with Database(row["database"]) as database:
        found = database.run(with_real_names(program, row["names"]))
        return not found.error and same_answer(found.rows, database.run(row["gold"]).rows, row["ordered"])


def _readable(question: spider.Question) -> Row:
    return _row(question, question.text, spider.listing(question.database))


def _row(question: spider.Question, text: str, schema: str) -> Row:
    return {
        "question": text,
        "schema": schema,
        "database": str(question.database),
        "gold": question.query,
        "ordered": question.ordered,
    }


def _database(number: int) -> Path:
    """The file of a generated database, written whole or not at all."""
    path = (DATABASES / f"{number:03}.sqlite").resolve()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        with closing(sqlite3.connect(draft)) as target, closing(company.database(number)) as source:
            source.backup(target)
        draft.replace(path)
    return path
