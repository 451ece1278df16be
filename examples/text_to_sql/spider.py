"""Spider (Yu et al. 2018): questions over 200 databases, from $AGL_DATA/spider.

The folder holds database/NAME/NAME.sqlite and either the files of the published archive (train_spider.json, dev.json) or
train.jsonl.gz and dev.jsonl.gz. The Hugging Face hub has the questions but not the databases, so nothing is downloaded.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from database import Database

Split = Literal["train", "dev"]
ARCHIVE = {"train": "train_spider.json", "dev": "dev.json"}
MAX_CELLS = 3000
"""Distinct values of a column that are looked at."""
HELD_OUT = 51
"""Of 256: a fifth of a file of your own."""
IRREGULAR = ("sses", "ches", "shes", "xes")


@dataclass(frozen=True)
class Question:
    text: str
    query: str
    database: Path

    @property
    def ordered(self) -> bool:
        """Tells whether the rows come in an order that the question asks for: an order outside of all brackets."""
        query, inner = self.query.lower(), 1
        while inner:
            query, inner = re.subn(r"\([^()]*\)", " ", query)
        return re.search(r"\border\s+by\b", query) is not None


@dataclass(frozen=True)
class Column:
    table: int
    name: str
    words: tuple[str, ...]
    kind: str
    """num, txt or oth."""


@dataclass(frozen=True)
class Schema:
    """A database as a question's words are looked up in it."""

    tables: tuple[str, ...]
    table_words: tuple[tuple[str, ...], ...]
    columns: tuple[Column, ...]
    cells: dict[str, dict[int, str]]
    """Text cell in lower case without punctuation -> {column: the cell as it is}."""
    keys: tuple[tuple[int, int], ...] = ()
    """Columns that refer to a column of another table, and that column."""


def load(split: Split) -> list[Question]:
    """All questions of a split whose gold query gives something: any wrong query that finds nothing would match the others.

    FileNotFoundError, with what is needed, where the data are not there.
    """
    root = folder()
    questions = [
        Question(row["question"], row["query"], root / "database" / row["db_id"] / f"{row['db_id']}.sqlite")
        for row in _rows(root, split)
    ]
    return _saying_something(questions)


def read_own(file: Path) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions of a JSONL file of yours: {"question", "query", "database"}, a SQLite file beside it.

    Held out are a fifth of the databases, of fewer than five databases a fifth of the questions.
    """
    questions = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        if not isinstance(row, dict) or not {"question", "query", "database"} <= row.keys():
            raise SystemExit(f"{file}, row {number}: expected question, query and database")
        database = (file.parent / row["database"]).resolve()
        if not database.is_file():
            raise SystemExit(f"{file}, row {number}: database: {database} does not exist")
        questions.append(Question(row["question"], row["query"], database))
    several = len({question.database for question in questions}) >= 5
    sides: tuple[list[Question], list[Question]] = ([], [])
    for question in _saying_something(questions):
        name = question.database.name if several else question.text
        sides[hashlib.md5(name.encode()).digest()[0] < HELD_OUT].append(question)
    return sides


def _saying_something(questions: list[Question]) -> list[Question]:
    by_database: dict[Path, list[Question]] = {}
    for question in questions:
        by_database.setdefault(question.database, []).append(question)
    kept = set()
    for path, group in by_database.items():
        with Database(path) as database:
            kept.update(question for question in group if _says_something(database, question.query))
    return [question for question in questions if question in kept]


def folder() -> Path:
    root = os.environ.get("AGL_DATA")
    place = Path(root, "spider").resolve() if root else None
    if place is None or not (place / "database").is_dir():
        where = f"{place / 'database'} does not exist" if place else "AGL_DATA is not set"
        raise FileNotFoundError(
            f"{where}: unpack spider.zip from https://yale-lily.github.io/spider and set AGL_DATA to the folder"
            " that holds spider/"
        )
    return place


def is_single_table(query: str) -> bool:
    """One select from one table: no join, no nesting, no set operation."""
    return _tables_of_one_select(query) == 1


def is_two_tables(query: str) -> bool:
    """One select from two tables by one join: no nesting, no set operation."""
    return _tables_of_one_select(query) == 2


def _tables_of_one_select(query: str) -> int:
    """The number of tables that are joined; 0 where there is more than one select, or a list of tables."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "x", query.lower())
    if len(re.findall(r"\bselect\b", text)) != 1:
        return 0
    source = re.search(r"\bfrom\b(.*?)(\bwhere\b|\bgroup\b|\border\b|\blimit\b|$)", text, re.DOTALL)
    if source is None or "," in source[1]:
        return 0
    return 1 + len(re.findall(r"\bjoin\b", text))


def schema(path: Path) -> Schema:
    """Tables, columns and text cells of a database file."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", "ignore")
        tables = [
            row[0]
            for row in connection.execute(
                "select name from sqlite_master where type = 'table' and name not like 'sqlite_%' order by rowid"
            )
        ]
        columns = []
        for index, table in enumerate(tables):
            for row in connection.execute(f"pragma table_info([{table}])"):
                columns.append(Column(index, row[1], lemmas(row[1]), _kind(row[2])))
        keys = []
        for table in tables:
            for row in connection.execute(f"pragma foreign_key_list([{table}])"):
                ends = _place(columns, tables, table, row[3]), _place(columns, tables, row[2], row[4])
                if None not in ends and row[2].lower() != table.lower():
                    keys.append(ends)
        cells: dict[str, dict[int, str]] = {}
        for index, column in enumerate(columns):
            for (value,) in connection.execute(
                f"select distinct [{column.name}] from [{tables[column.table]}] limit {MAX_CELLS}"
            ):
                if isinstance(value, str) and 1 < len(value) <= 40:
                    cells.setdefault(cell_key(value), {})[index] = value
    return Schema(
        tuple(tables), tuple(lemmas(table) for table in tables), tuple(columns), cells, tuple(dict.fromkeys(keys))
    )


def _place(columns: list[Column], tables: list[str], table: str, name: str | None) -> int | None:
    """The number of a table's column; None where there is none: a key may refer to what was never made."""
    wanted = table.lower(), (name or "").lower()
    return next((at for at, one in enumerate(columns) if (tables[one.table].lower(), one.name.lower()) == wanted), None)


@lru_cache(maxsize=256)
def listing(path: Path) -> str:
    """Tables and columns as a model that can read is shown them, a quarter of the tokens of their CREATE statements."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            "select t.name, group_concat(c.name, ', ') from sqlite_master t join pragma_table_info(t.name) c"
            " where t.type = 'table' and t.name not like 'sqlite_%' group by t.rowid order by t.rowid"
        )
        return "\n".join(f"{table}({columns})" for table, columns in rows)


def lemmas(name: str) -> tuple[str, ...]:
    """The words of a name, in lower case and singular: "BornStates" -> ("born", "state")."""
    apart = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).replace("_", " ")
    return tuple(lemma(word) for word in re.findall(r"[A-Za-z]+|\d+", apart))


def lemma(word: str) -> str:
    word = word.lower()
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(IRREGULAR):
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def cell_key(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _says_something(database: Database, query: str) -> bool:
    result = database.run(query)
    return not result.error and any(value not in (None, 0) for row in result.rows for value in row)


def _kind(declared: str) -> str:
    declared = declared.lower()
    if re.search(r"int|num|real|float|double|dec|bit|bool", declared):
        return "num"
    return "txt" if re.search(r"char|text|clob", declared) else "oth"


def _rows(root: Path, split: Split) -> Iterable[dict[str, Any]]:
    lines = root / f"{split}.jsonl.gz"
    if lines.exists():
        with gzip.open(lines, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    archive = root / ARCHIVE[split]
    if not archive.exists():
        raise FileNotFoundError(f"{lines} does not exist, and neither does {archive}")
    rows: list[dict[str, Any]] = json.loads(archive.read_text(encoding="utf-8"))
    return rows
