"""Names for what a question is about, so that a tiny model need not spell: tables T0.., columns C0.., values V0..., and J0..
for two tables joined by a key.

    How many heads of the departments are older than 56 ?
    how many T0 of the T1 are older than V0 ? schema T0 head : C0 head id num C1 name txt ... T1 department : ...

Words of the question that name a table or column of the database are replaced by its short name, words that are part of a
column's name get `~ C1` behind them, and quoted text, numbers and cells of the database become values, with `@ C2` where the
value is a cell of that column. It is plain text work: no label is looked at. Columns are numbered in the order in which the
text mentions them. `renumber` draws other numbers, so that a model learns to bind names and not to count.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from spider import Schema, cell_key, lemma

MAX_TABLES, MAX_COLUMNS, MAX_VALUES, MAX_JOINS = 3, 14, 5, 4
QUESTION_WORDS, SCHEMA_WORDS = 60, 100
"""Longest texts that are shown; what is beyond is cut."""
STOP = frozenset(
    re.findall(
        r"\w+",
        """the a an of in on at to for and or is are was were be by with from that who which what how many much show list
        find give me all each every their there do does did have has had return tell us we you it its as not than more less
        most least number name id ids names total different distinct""",
    )
)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
KEYWORDS = (
    *(
        "select",
        "distinct",
        "count",
        "sum",
        "avg",
        "max",
        "min",
        "from",
        "where",
        "and",
        "or",
        "between",
        "like",
        "not",
    ),
    *("group", "by", "having", "order", "asc", "desc", "limit", "(", ")", "*", ",", "=", "!=", ">", "<", ">=", "<="),
)
TOKEN = re.compile(r"\d+(?:\.\d+)?|[A-Za-z]+|[^\sA-Za-z0-9]")
QUOTED = re.compile(r"\"([^\"]+)\"|(?<![A-Za-z])['‘“]([^'’”]+)['’”](?![A-Za-z])")
SQL_TOKEN = re.compile(
    r"'[^']*'|\"[^\"]*\"|\d+\.\d+|\d+|[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_*][A-Za-z0-9_]*)?|<>|>=|<=|!=|[^\s]"
)
SHORT = re.compile(r"[TCVJ]\d+")
JOINED = re.compile(
    r"\bfrom\s+(\w+)(?:\s+as\s+(\w+))?\s+join\s+(\w+)(?:\s+as\s+(\w+))?\s+on\s+(\w+)\.(\w+)\s*=\s*(\w+)\.(\w+)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Masked:
    """A question as a tiny model is shown it."""

    question: str
    schema: str
    names: dict[str, str]
    """What a short name stands for in SQL: {"T0": "[head]", "C0": "[head].[age]", "V0": "56"}."""


@dataclass(frozen=True)
class _Value:
    end: int
    value: str | int | float
    columns: tuple[int, ...]


def mask(question: str, schema: Schema, joins: bool = False) -> Masked:
    """The question with short names for the (at most 3) tables, 14 columns and 5 values that it seems to be about.

    joins: the first two tables are joined by a key, if any are, and each such pair of the tables has a name, too.
    """
    return _Linker(question, schema, joins).masked()


def mask_query(query: str, names: dict[str, str]) -> str | None:
    """A query over one table, or two joined by a key, in short names; None where it needs a name, value or word that there
    is none for."""
    text = query.strip().rstrip(";")
    short = {real.lower(): name for name, real in names.items()}
    tables: dict[str, str] = {}
    if join := JOINED.search(text):
        tables, source = _joined(join, short)
        if not source:
            return None
        text = f"{text[: join.start()]} from {source} {text[join.end() :]}"
    tokens = SQL_TOKEN.findall(text)
    lower = [token.lower() for token in tokens]
    table = lower[lower.index("from") + 1]
    written: list[str] = []
    skip = False
    for index, (token, word) in enumerate(zip(tokens, lower, strict=True)):
        if skip or word == "as":
            skip = not skip
            continue
        if word == "<>":
            written.append("!=")
        elif index and lower[index - 1] == "from":
            written.append(token if join else short.get(f"[{word}]", ""))
        elif word in KEYWORDS:
            written.append(word)
        elif word[0] in "'\"" or word[0].isdigit():
            written.append(_value_name(token, names, written))
        else:
            alias, _, column = word.rpartition(".")
            possible = [tables[alias]] if alias in tables else sorted({*tables.values()}) or [table]
            found = [short[real] for real in (f"[{one}].[{column}]" for one in possible) if real in short]
            written.append("*" if column == "*" and not join else found[0] if len(found) == 1 else "")
    if "order" in written and "asc" not in written and "desc" not in written:
        written.insert(written.index("limit") if "limit" in written else len(written), "asc")
    return " ".join(written) if all(written) else None


def renumber(names: dict[str, str], rng: random.Random) -> dict[str, str]:
    """Another short name for each of `names`, of the same letter: T0 -> T2, C0 -> C7, V0 -> V3."""
    drawn = {}
    for letter, most in (("T", MAX_TABLES), ("C", MAX_COLUMNS), ("V", MAX_VALUES), ("J", MAX_JOINS)):
        used = [name for name in names if name[0] == letter]
        for name, number in zip(used, rng.sample(range(most), len(used)), strict=True):
            drawn[name] = f"{letter}{number}"
    return drawn


def renamed(text: str, drawn: dict[str, str]) -> str:
    return SHORT.sub(lambda match: drawn.get(match[0], match[0]), text)


def _joined(join: re.Match[str], short: dict[str, str]) -> tuple[dict[str, str], str]:
    """Alias -> table of a join, and the join's short name; "" where there is none."""
    first, alias, second, other, left, left_column, right, right_column = (
        part and part.lower() for part in join.groups()
    )
    tables = {first: first, second: second, alias or first: first, other or second: second}
    ends = [(tables.get(left), left_column), (tables.get(right), right_column)]
    for (a, x), (b, y) in (ends, ends[::-1]):
        if name := short.get(f"[{a}] join [{b}] on [{a}].[{x}] = [{b}].[{y}]"):
            return tables, name
    return tables, ""


def _value_name(token: str, names: dict[str, str], written: list[str]) -> str:
    """The short name of a literal, one that is not used yet if there is one; a literal 1 needs none."""
    wanted = token.strip("'\"").strip("%").strip().lower()
    fitting = [name for name, real in names.items() if name[0] == "V" and _is_value(real, wanted)]
    if not fitting:
        return "1" if wanted == "1" else ""
    return next((name for name in fitting if name not in written), fitting[0])


def _is_value(real: str, wanted: str) -> bool:
    value = real.strip("'").replace("''", "'").strip().lower()
    if value == wanted:
        return True
    return (
        not real.startswith("'") and re.fullmatch(r"\d+(\.\d+)?", wanted) is not None and float(value) == float(wanted)
    )


class _Linker:
    """One question against one schema: spans of its words are claimed by values and by phrases of the schema."""

    def __init__(self, question: str, schema: Schema, joins: bool) -> None:
        self._schema = schema
        self._pairs = [(schema.columns[a].table, schema.columns[b].table) for a, b in schema.keys] if joins else []
        matches = list(TOKEN.finditer(question))
        self._words = [match.group() for match in matches]
        self._lower_case = question.islower()
        self._lemmas = [lemma(word) for word in self._words]
        self._taken = [False] * len(self._words)
        self._values: dict[int, _Value] = {}
        self._phrases: dict[int, tuple[int, list[int], list[int]]] = {}
        """First word -> (end, tables, columns) that the words name."""
        self._find_quoted(question, matches)
        self._find_phrases_and_cells()
        self._find_numbers()
        self._values = dict(sorted(self._values.items())[:MAX_VALUES])
        self._choose()

    def masked(self) -> Masked:
        words = self._text()
        mentioned = [name for name in dict.fromkeys(words) if re.fullmatch(r"C\d+", name)]
        first = [self._columns[int(name[1:])] for name in mentioned]
        order = first + [column for column in self._columns if column not in first]
        moved = {f"C{self._columns.index(column)}": f"C{number}" for number, column in enumerate(order)}
        self._columns = order
        words = [moved.get(word, word) for word in words]
        return Masked(" ".join(words[:QUESTION_WORDS]), " ".join(self._schema_text()[:SCHEMA_WORDS]), self._names())

    def _find_quoted(self, question: str, matches: list[re.Match[str]]) -> None:
        for quoted in QUOTED.finditer(question):
            span = [index for index, match in enumerate(matches) if quoted.start() <= match.start() < quoted.end()]
            if span and not any(self._taken[index] for index in span):
                text = quoted[1] or quoted[2]
                cells = self._schema.cells.get(cell_key(text), {})
                self._take(span[0], span[-1] + 1, next(iter(cells.values()), text.strip()), cells)

    def _find_phrases_and_cells(self) -> None:
        """Longer ones first; a single word is a cell only if it is written like a name, or nothing is."""
        phrases: dict[tuple[str, ...], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for index, words in enumerate(self._schema.table_words):
            phrases[words][0].append(index)
        for index, column in enumerate(self._schema.columns):
            phrases[column.words][1].append(index)
        for length in range(5, 0, -1):
            for start in range(len(self._words) - length + 1):
                end = start + length
                if any(self._taken[start:end]):
                    continue
                found = phrases.get(tuple(self._lemmas[start:end]))
                if found:
                    self._phrases[start] = (end, *found)
                    self._taken[start:end] = [True] * length
                    continue
                text = " ".join(word.lower() for word in self._words[start:end])
                like_a_name = self._lower_case or self._words[start][0].isupper()
                named = length > 1 or (start > 0 and like_a_name and text not in STOP and not text.isdigit())
                if named and text in self._schema.cells:
                    cells = self._schema.cells[text]
                    self._take(start, end, next(iter(cells.values())), cells)

    def _find_numbers(self) -> None:
        for index, word in enumerate(self._words):
            if self._taken[index]:
                continue
            if re.fullmatch(r"\d+(\.\d+)?", word):
                self._take(index, index + 1, float(word) if "." in word else int(word), ())
            elif word.lower() in NUMBERS and word.lower() != "one":
                self._take(index, index + 1, NUMBERS.index(word.lower()), ())

    def _take(self, start: int, end: int, value: str | float, columns: Iterable[int]) -> None:
        self._values[start] = _Value(end, value, tuple(columns))
        self._taken[start:end] = [True] * (end - start)

    def _choose(self) -> None:
        """The tables and columns that the question is most likely about."""
        columns = self._schema.columns
        asked = {word for word in self._lemmas if word not in STOP}
        tables = [0.8 * len(asked & set(words)) / max(1, len(words)) for words in self._schema.table_words]
        scores = [0.0] * len(columns)
        first = [99] * len(columns)
        for start, (_, named_tables, named_columns) in self._phrases.items():
            for table in named_tables:
                tables[table] += 2 - 0.02 * start
            for column in named_columns:
                scores[column], first[column] = 3, min(first[column], start)
        for start, value in self._values.items():
            for column in value.columns:
                scores[column], first[column] = max(scores[column], 2), min(first[column], start)
        for index, column_ in enumerate(columns):
            common = asked & set(column_.words)
            if scores[index] < 1 and common:
                scores[index] = len(common) / len(column_.words)
                first[index] = min(at for at, word in enumerate(self._lemmas) if word in common)
            tables[column_.table] += 0.4 * min(scores[index], 2)
        order = sorted(range(len(tables)), key=lambda table: -tables[table])
        if self._pairs:
            best = max(self._pairs, key=lambda pair: tables[pair[0]] + tables[pair[1]])
            order.sort(key=lambda table: table not in best)
        self._tables = order[:MAX_TABLES]
        shown = [key for key, pair in zip(self._schema.keys, self._pairs, strict=False) if {*pair} <= {*self._tables}]
        self._joins = shown[:MAX_JOINS]

        def rank(index: int) -> tuple[bool, int]:
            return scores[index] < 0.5, self._tables.index(columns[index].table)

        candidates = [index for index, column in enumerate(columns) if column.table in self._tables]
        kept = sorted(candidates, key=lambda index: (*rank(index), -scores[index], index))[:MAX_COLUMNS]
        self._columns = sorted(kept, key=lambda index: (*rank(index), first[index], index))

    def _text(self) -> list[str]:
        """The question's words, with names by the preliminary order of the columns."""
        names = {start: f"V{number}" for number, start in enumerate(self._values)}
        words: list[str] = []
        at = 0
        while at < len(self._words):
            if at in self._values:
                words += [names[at], *self._column_name("@", self._values[at].columns)]
                at = self._values[at].end
                continue
            if at in self._phrases:
                end, named_tables, named_columns = self._phrases[at]
                shown = [table for table in self._tables if table in named_tables]
                table_name = [f"T{self._tables.index(shown[0])}"] if shown else []
                column_name = self._column_name("/", named_columns)
                if table_name or column_name:
                    words += table_name + (column_name if table_name else column_name[1:])
                    at = end
                    continue
            words += self._word(at)
            at += 1
        return words

    def _word(self, at: int) -> list[str]:
        """A word that is no name, with the column or table behind it whose name it is part of."""
        word, stem = self._words[at], self._lemmas[at]
        if word in "\"'‘’“”`":
            return []
        if stem in STOP or len(stem) <= 2:
            return [word.lower()]
        for number, column in enumerate(self._columns):
            if stem in self._schema.columns[column].words:
                return [word.lower(), "~", f"C{number}"]
        for number, table in enumerate(self._tables):
            if stem in self._schema.table_words[table]:
                return [word.lower(), "~", f"T{number}"]
        return [word.lower()]

    def _column_name(self, mark: str, columns: Iterable[int]) -> list[str]:
        """The mark and the name of the shown column of the best table among those; nothing where none is shown."""
        shown = [column for column in self._columns if column in columns]
        if not shown:
            return []
        best = min(shown, key=lambda column: self._tables.index(self._schema.columns[column].table))
        return [mark, f"C{self._columns.index(best)}"]

    def _schema_text(self) -> list[str]:
        words: list[str] = []
        for number, table in enumerate(self._tables):
            words += [f"T{number}", *self._schema.table_words[table][:3], ":"]
            for column_number, index in enumerate(self._columns):
                column = self._schema.columns[index]
                if column.table == table:
                    words += [f"C{column_number}", *column.words[:3], column.kind]
        for number, key in enumerate(self._joins):
            words += [f"J{number}", ":", *(f"T{self._tables.index(self._schema.columns[end].table)}" for end in key)]
        return words

    def _names(self) -> dict[str, str]:
        tables = self._schema.tables
        names = {f"T{number}": f"[{tables[table]}]" for number, table in enumerate(self._tables)}
        for number, index in enumerate(self._columns):
            column = self._schema.columns[index]
            names[f"C{number}"] = f"[{tables[column.table]}].[{column.name}]"
        for number, value in enumerate(self._values.values()):
            literal = value.value
            names[f"V{number}"] = "'" + literal.replace("'", "''") + "'" if isinstance(literal, str) else str(literal)
        for number, key in enumerate(self._joins):
            (a, x), (b, y) = ((tables[self._schema.columns[end].table], self._schema.columns[end].name) for end in key)
            names[f"J{number}"] = f"[{a}] join [{b}] on [{a}].[{x}] = [{b}].[{y}]"
        return names
