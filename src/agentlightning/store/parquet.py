"""Records as Arrow tables and Parquet files: columns by the fields of a type, nested values of no fixed shape as JSON text.

Driven by export.py and by notebooks (analysis/stored_run.py); needs pyarrow. Knows no stores.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import orjson

from agentlightning.errors import MissingExtraError
from agentlightning.records import Call
from agentlightning.runtime.disk import PRIVATE_FILE

try:
    import pyarrow as pyarrow
    from pyarrow import parquet
except ModuleNotFoundError as cause:
    raise MissingExtraError("pyarrow", "data") from cause

NARROW: dict[tuple[type, str], Any] = {
    (Call, "suffix_ids"): pyarrow.list_(pyarrow.int32()),
    (Call, "sampled_ids"): pyarrow.list_(pyarrow.int32()),
    (Call, "logprobs"): pyarrow.list_(pyarrow.float32()),
}
"""Fields of which stores keep 32 bits."""


class RecordTable:
    """Arrow tables of records of one type."""

    def __init__(self, kind: type) -> None:
        hints = typing.get_type_hints(kind)
        columns = {name: NARROW.get((kind, name)) or _column(hint) for name, hint in hints.items()}
        self._as_text = [name for name, hint in hints.items() if _is_json(hint)]
        self.schema = pyarrow.schema(list(columns.items()))

    def of(self, records: Sequence[Any]) -> pyarrow.Table:
        """These records, a row each."""
        rows = [dataclasses.asdict(record) for record in records]
        for row in rows:
            for name in self._as_text:
                row[name] = None if row[name] is None else orjson.dumps(row[name]).decode()
        return pyarrow.Table.from_pylist(rows, schema=self.schema)


@contextmanager
def parquet_file(path: Path, kind: type) -> Iterator[Callable[[Sequence[Any]], None]]:
    """A file of records of one type, which its context appends to as groups of rows; on the disk when that ends."""
    table = RecordTable(kind)
    path.touch(PRIVATE_FILE)
    with parquet.ParquetWriter(path, table.schema, compression="zstd") as writer:
        yield lambda records: writer.write_table(table.of(records)) if records else None
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _is_json(hint: Any) -> bool:
    """Values of any shape: objects, and lists of objects."""
    hint = _without_none(hint)
    return _without_items(hint) is dict or any(map(_is_json, typing.get_args(hint)))


def _column(hint: Any) -> Any:
    hint = _without_none(hint)
    simple = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    if hint in simple:
        return simple[hint]
    if typing.get_origin(hint) is Literal or _is_json(hint):
        return pyarrow.string()
    if dataclasses.is_dataclass(hint):
        return pyarrow.struct([(name, _column(inner)) for name, inner in typing.get_type_hints(hint).items()])
    if _without_items(hint) in (list, tuple):
        return pyarrow.list_(_column(typing.get_args(hint)[0]))
    raise TypeError(f"no column for {hint}")


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(inner for inner in typing.get_args(hint) if inner is not type(None))
    return hint


def _without_items(hint: Any) -> Any:
    return typing.get_origin(hint) or hint
