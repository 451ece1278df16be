"""Columns of summaries that a process has read, kept for the next page: another order, another filter, the next rows.

Driven by columns.py. Knows nothing of what an array holds, so that a store loads without numpy.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

MAX_CACHED_BYTES = 64 * 2**20
"""Of all columns together: those of a filter over a million rollouts take about half of it."""

ColumnKey = tuple[str, int, str]
"""Id of a run, the time at which it was made, and a field: a run that is deleted and made again is another."""


class ColumnCache:
    """Columns that do not change but grow, those read last; safe for several threads."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._columns: OrderedDict[ColumnKey, tuple[int, Any]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: ColumnKey) -> tuple[int, Any]:
        """Returns how many chunks are known of a column, and its values as an array; 0 and None where none is."""
        with self._lock:
            if key not in self._columns:
                return 0, None
            self._columns.move_to_end(key)
            return self._columns[key]

    def put(self, key: ColumnKey, chunks: int, values: Any) -> None:
        """Keep a column of so many chunks, which nobody changes; drops those that were not read for longest."""
        with self._lock:
            self._drop(key)
            self._columns[key] = chunks, values
            self._bytes += values.nbytes
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._columns)))

    def _drop(self, key: ColumnKey) -> None:
        if key in self._columns:
            self._bytes -= self._columns.pop(key)[1].nbytes
