"""Tasks: the rows an agent is run on, from files, hub data sets or a callable, and the order in which training takes them.

Driven by the trainer; knows nothing of agents or stores. Every row is one JSON object.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from agentlightning.errors import DataError, MissingExtraError, boundary
from agentlightning.records import JSON
from agentlightning.runner.user_code import load

Source = str | Sequence[JSON] | Callable[..., Iterable[JSON]]


def load_tasks(source: Source, seed: int = 0) -> list[JSON]:
    """All rows of a source; DataError, with the row's number and field, where one is not what was expected.

    Args:
        source: a .jsonl, .csv or .parquet file (.jsonl.gz too), ``hub:NAME[:SPLIT]``, ``file.py:name`` or a callable (which
            may take ``seed``), or the rows themselves.

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
    with boundary(f"reading {source}", DataError):
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8-sig") as file:
                return list(csv.DictReader(file))
        if path.suffix == ".parquet":
            return _parquet(path)
        if path.name.endswith((".jsonl", ".jsonl.gz", ".json")):
            return _jsonl(path)
    raise DataError(f"{source}: unknown kind of file; expected .jsonl, .csv or .parquet")


def _called(function: Callable[..., Iterable[JSON]], seed: int) -> Iterable[JSON]:
    takes_seed = "seed" in inspect.signature(function).parameters
    with boundary(f"data function {getattr(function, '__name__', function)}", DataError):
        return list(function(seed=seed) if takes_seed else function())


def _jsonl(path: Path) -> list[JSON]:
    rows: list[JSON] = []
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as cause:
                raise DataError(f"{path}, line {number}: not JSON: {cause}") from cause
    return rows


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
