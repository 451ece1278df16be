"""Tasks: the rows an agent is run on, from files, hub data sets or a callable, and the order in which training takes them.

Driven by the trainer; knows nothing of agents or stores. Every row is one JSON object.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import inspect
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import orjson

from agentlightning.errors import DataError, MissingExtraError, boundary
from agentlightning.records import JSON
from agentlightning.runner.user_code import load

MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 64) - 1

Source = str | Sequence[JSON] | Callable[..., Iterable[JSON]]


def load_tasks(source: Source, seed: int = 0) -> list[JSON]:
    """All rows of a source; DataError, with the row's number and field, where one is not what was expected.

    Args:
        source: a .jsonl, .json, .csv or .parquet file (text also as .gz), ``hub:NAME[:SPLIT]``, ``file.py:name`` or a
            callable (which may take ``seed``), or the rows themselves.

    Fields of the first row must be in all rows.
    """
    name = source if isinstance(source, str) else "tasks"
    rows = list(_read(source, seed))
    if not rows:
        raise DataError(f"{name}: holds no task")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{name}, row {number}: expected a JSON object, got {type(row).__name__}")
        if missing := sorted(set(rows[0]) - set(row)):
            raise DataError(f"{name}, row {number}: field {missing[0]!r} is missing")
        if problem := next(_not_kept(row, ""), None):
            raise DataError(f"{name}, row {number}: {problem}")
        try:
            orjson.dumps(row)
        except TypeError as cause:
            raise DataError(f"{name}, row {number}: not JSON: {cause}") from cause
    return rows


def content_key(content: object, size: int = 16) -> str:
    """A key that equal JSON values share, whatever the order of their fields."""
    return hashlib.blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=size).hexdigest()


def _read(source: Source, seed: int) -> Iterable[JSON]:
    if not isinstance(source, str):
        return _called(source, seed) if callable(source) else source
    if source.startswith("hub:"):
        return _hub(source.removeprefix("hub:"))
    if ".py:" in source or (":" in source and not Path(source).exists()):
        return _called(load(source, parameters=None, what="data function"), seed)
    path = Path(source)
    if not path.exists():
        raise DataError(f"{source}: no such file; give a .jsonl, .csv or .parquet file, hub:NAME or file.py:name")
    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    with boundary(f"reading {source}", DataError):
        if kind == "parquet":
            return _parquet(path)
        if kind in TEXTS:
            opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
            with opener(path, "rt", encoding="utf-8-sig", newline="" if kind == "csv" else None) as file:
                return TEXTS[kind](path, file)
    raise DataError(f"{source}: unknown kind of file; expected .jsonl, .json, .csv or .parquet")


def _called(function: Callable[..., Iterable[JSON]], seed: int) -> Iterable[JSON]:
    takes_seed = "seed" in inspect.signature(function).parameters
    with boundary(f"data function {getattr(function, '__name__', function)}", DataError):
        return list(function(seed=seed) if takes_seed else function())


def _csv(path: Path, file: TextIO) -> list[JSON]:
    csv.field_size_limit(sys.maxsize)  # 128 KiB by itself, less than a long document
    lines = filter(None, rows := csv.reader(file, strict=True))  # else an open quote swallows the rows after it
    names = next(lines, [])
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{path}, line {rows.line_num}: expected distinct names of fields, got {twice[0]!r} twice")
    tasks: list[JSON] = []
    for cells in lines:
        if len(cells) != len(names):
            raise DataError(f"{path}, line {rows.line_num}: expected {len(names)} fields, got {len(cells)}")
        tasks.append(dict(zip(names, cells, strict=True)))
    return tasks


def _json(path: Path, file: TextIO) -> list[JSON]:
    """An array of rows, one row, or a row a line."""
    try:
        whole = json.load(file)
    except json.JSONDecodeError as cause:
        file.seek(0)
        if not cause.msg.startswith("Extra data"):
            raise DataError(f"{path}, line {cause.lineno}: not JSON: {cause}") from cause
        return _jsonl(path, file)
    return whole if isinstance(whole, list) else [whole]


def _jsonl(path: Path, file: TextIO) -> list[JSON]:
    rows: list[JSON] = []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as cause:
            raise DataError(f"{path}, line {number}: not JSON: {cause}") from cause
    return rows


TEXTS: Mapping[str, Callable[[Path, TextIO], list[JSON]]] = MappingProxyType(
    {"csv": _csv, "jsonl": _jsonl, "json": _json}
)
"""Readers of text files, by the ending of their names."""


def _not_kept(value: Any, field: str) -> Iterator[str]:
    """Names what stores would not give back as it is: they write NaN as null, and have integers of 64 bits."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _not_kept(inner, f"{field}.{name}" if field else f"field {name!r}")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _not_kept(inner, f"{field}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{field}: expected a finite number, got {value}"
    elif isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
        yield f"{field}: expected an integer of at most 64 bits, or a text, got one of {value.bit_length()} bits"


def _parquet(path: Path) -> list[JSON]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as cause:
        raise MissingExtraError("pyarrow", "data") from cause
    rows: list[Any] = parquet.read_table(path).to_pylist()
    return rows


def _hub(name: str) -> Iterable[JSON]:
    try:
        import datasets
    except ImportError as cause:
        raise MissingExtraError("datasets", "data") from cause
    path, _, split = name.partition(":")
    with boundary(f"hub data set {name}", DataError):
        return [dict(row) for row in datasets.load_dataset(path, split=split or "train")]
