"""The default demo task: answer a question about a small company from a database whose schema has to be looked up.

The agent writes `<sql>…</sql>` and gets one cell back, up to three times, then `Answer: …`. Table and pay column are named
differently in every database, so a good agent asks for `.schema` first, picks the right aggregate or order, filters on
the right column, and copies the cell. The demonstrator fails at each of the first three.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from random import Random
from typing import Any

from agentlightning.demo.tasks import (
    CITIES,
    PEOPLE,
    TINY_SETTINGS,
    Message,
    Split,
    TrainingSettings,
    answer_with_tool,
    held_out,
)
from agentlightning.records import JSON

SPECIAL_WORDS = ("<sql>", "</sql>")
WARM_START_STEPS = 200
TRAINING = TrainingSettings(steps=32, tasks_per_step=32, tables=TINY_SETTINGS)
MAX_CALLS = 4
MAX_TOKENS = 30

TABLES = ("staff", "people", "workers", "members")
PAY_COLUMNS = ("pay", "wage", "salary")
DEPARTMENTS = ("sales", "legal", "design", "support", "research")
DATABASES = {"train": range(100), "test": range(100, 150)}

# Wording, what to select, in which order; {pay} stands for the pay column of the database.
QUESTIONS = (
    ("How many people work in {where}?", "count(*)", ""),
    ("How many staff are there in {where}?", "count(*)", ""),
    ("What is the highest pay in {where}?", "max({pay})", ""),
    ("What does the best paid person in {where} earn?", "max({pay})", ""),
    ("What is the lowest pay in {where}?", "min({pay})", ""),
    ("What does the worst paid person in {where} earn?", "min({pay})", ""),
    ("How old is the oldest person in {where}?", "max(age)", ""),
    ("How old is the youngest person in {where}?", "min(age)", ""),
    ("What is the total pay in {where}?", "sum({pay})", ""),
    ("How much do we pay in all in {where}?", "sum({pay})", ""),
    ("Who is the oldest in {where}?", "name", " order by age desc"),
    ("Who is the youngest in {where}?", "name", " order by age"),
)

LOOKS_AT_SCHEMA = 0.6
RIGHT_AGGREGATE = 0.25
RIGHT_FILTER = 0.75
TRIES_AGAIN = 0.4
CONFUSED = {
    "max({pay})": "min({pay})",
    "min({pay})": "max({pay})",
    "max(age)": "min(age)",
    "min(age)": "max(age)",
    "sum({pay})": "count(*)",
    "count(*)": "sum({pay})",
}


async def solve(task: JSON, llm: Any) -> float:
    """The agent: plain OpenAI-SDK code, a tool and a limit on calls."""
    with closing(database(task["database"])) as company:
        return await answer_with_tool(
            task, llm, lambda query: execute(company, query), SPECIAL_WORDS, MAX_CALLS, MAX_TOKENS
        )


def database(number: int) -> sqlite3.Connection:
    """The company database of that number: one table of 16 people, read-only, always the same for the same number."""
    rng = Random(number)
    table, pay = rng.choice(TABLES), rng.choice(PAY_COLUMNS)
    ages, pays = rng.sample(range(20, 65), len(PEOPLE)), rng.sample(range(20, 99), len(PEOPLE))
    people = [
        (p, rng.choice(CITIES), rng.choice(DEPARTMENTS), a, m) for p, a, m in zip(PEOPLE, ages, pays, strict=True)
    ]
    company = sqlite3.connect(":memory:", check_same_thread=False)
    company.execute(f"create table {table} (name text, city text, dept text, age int, {pay} int)")
    company.executemany(f"insert into {table} values (?, ?, ?, ?, ?)", people)
    company.commit()
    company.execute("pragma query_only = 1")
    company.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
    company.set_progress_handler(lambda: True, 100_000)  # a sampled query may be a cross join: it ends as an error
    return company


def execute(company: sqlite3.Connection, query: str) -> str:
    """The environment's answer: the schema, the first cell, `empty` where there is none (or it is 0), or `error`."""
    if query == ".schema":
        table = company.execute("select name from sqlite_master").fetchone()[0]
        return " ".join([table, *columns(company, table)])
    if not query.startswith("select"):
        return "error"
    try:
        row = company.execute(query).fetchone()
    except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError):
        return "error"
    return "empty" if row is None or row[0] in (None, 0, "") else str(row[0])[:12]


def sample(rng: Random, split: Split) -> JSON:
    """One question with an answer: `question`, `database`, `answer`, and the `plan` that a flawless agent would follow."""
    while True:
        wording, select, order = rng.choice(QUESTIONS)
        if rng.random() < 0.3:
            city, department = rng.choice(CITIES), rng.choice(DEPARTMENTS)
            where, filters = f"{department} in {city}", [["dept", department], ["city", city]]
        else:
            column, values = rng.choice((("city", CITIES), ("dept", DEPARTMENTS)))
            where = rng.choice(values)
            filters = [[column, where]]
        number = rng.choice(DATABASES[split])
        if held_out(wording + where) != (split == "test"):
            continue
        plan = {"select": select, "order": order, "filters": filters}
        with closing(database(number)) as company:
            answer = execute(company, write_query(plan, *names(company)))
        if answer != "empty":
            return {"question": wording.format(where=where), "database": number, "answer": answer, "plan": plan}


def demonstrate(task: JSON, rng: Random) -> list[Message]:
    """A demonstrator that knows the protocol, but often skips the schema, confuses opposites and filters wrongly."""
    messages: list[Message] = [{"role": "user", "content": task["question"]}]

    def call(query: str) -> str:
        messages.append({"role": "assistant", "content": f"<sql>{query}</sql>"})
        messages.append({"role": "user", "content": execute(company, query)})
        return messages[-1]["content"]

    with closing(database(task["database"])) as company:
        table, pay = rng.choice(TABLES), rng.choice(PAY_COLUMNS)
        if rng.random() < LOOKS_AT_SCHEMA:
            call(".schema")
            table, pay = names(company)
        result = call(write_query(mistaken(task["plan"], rng), table, pay))
        if result in ("empty", "error") and rng.random() < TRIES_AGAIN:
            if result == "error":
                call(".schema")
                table, pay = names(company)
            result = call(write_query(mistaken(task["plan"], rng), table, pay))
    messages.append({"role": "assistant", "content": f"Answer: {result}"})
    return messages


def mistaken(plan: JSON, rng: Random) -> JSON:
    """The plan as the demonstrator remembers it: mostly with the opposite aggregate or order, sometimes filtered wrongly."""
    select, order, filters = plan["select"], plan["order"], plan["filters"]
    if rng.random() >= RIGHT_AGGREGATE:
        if order:
            order = order.removesuffix(" desc") if order.endswith(" desc") else order + " desc"
        else:
            select = CONFUSED[select]
    if rng.random() >= RIGHT_FILTER:
        if len(filters) > 1:
            filters = [rng.choice(filters)]
        else:
            filters = [["city" if column == "dept" else "dept", value] for column, value in filters]
    return {"select": select, "order": order, "filters": filters}


def write_query(plan: JSON, table: str, pay: str) -> str:
    conditions = " and ".join(f"{column}='{value}'" for column, value in plan["filters"])
    return f"select {plan['select']} from {table} where {conditions}{plan['order']}".replace("{pay}", pay)


def names(company: sqlite3.Connection) -> tuple[str, str]:
    """Table and pay column of a database."""
    words = execute(company, ".schema").split()
    return words[0], words[-1]


def columns(company: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in company.execute(f"pragma table_info({table})")]
