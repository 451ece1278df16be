"""Files of traces and conversations as episodes: JSON Lines, JSON, objects one after the other; gzip.

Driven by the import of traces. A collector's file and an SDK's console output hold spans of many traces in any order:
they are gathered to the end of the file, and each trace is an episode. Everything else is a row by itself
(`adapters/episodes.py`).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from agentlightning.adapters.episodes import FORMATS, Episode, episode_of_spans, episodes_of_row
from agentlightning.adapters.sdk_spans import is_sdk_span, sdk_span
from agentlightning.errors import DataError
from agentlightning.records import Span
from agentlightning.tracing.otlp import from_object
from agentlightning.tracing.sanitize import sanitize_request

OTLP = ("resourceSpans", "scopeSpans")


class TraceFileReader:
    """One file, read once."""

    def __init__(self, path: Path, task_fields: Iterable[str] = ()) -> None:
        self._path = path
        self._task_fields = tuple(task_fields)
        self._traces: dict[str, list[Span]] = {}
        self.broken: Counter[str] = Counter()
        """Faults of OTLP spans, by cause; see `sanitize.py`."""
        self.found_fields: set[str] = set()
        """Those of `task_fields` that some row had."""

    def __iter__(self) -> Iterator[Episode]:
        """Its episodes. DataError, with the line, where the file cannot be read or a row is none of the known
        formats."""
        try:
            for place, value in self._values():
                yield from self._of_value(place, value)
        except FileNotFoundError:
            raise DataError(f"{self._path}: there is no such file") from None
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as cause:
            raise DataError(f"{self._path}: cannot be read: {cause}") from cause
        for spans in self._traces.values():
            yield episode_of_spans(spans)

    def _of_value(self, place: str, value: Any) -> Iterator[Episode]:
        if isinstance(value, dict) and any(name in value for name in OTLP):
            taken = sanitize_request(from_object(value))
            self.broken.update(taken.broken)
            self._gather(taken.spans)
        elif is_sdk_span(value):
            self._gather([span] if (span := sdk_span(value)) is not None else [])
        elif isinstance(value, list):
            for number, one in enumerate(value, 1):
                yield from self._of_value(f"{place}, entry {number}", one)
        else:
            yield from self._of_row(place, value)

    def _of_row(self, place: str, row: Any) -> Iterator[Episode]:
        try:
            found = episodes_of_row(row, self._task_fields)
        except DataError as wrong:
            raise DataError(f"{self._path}, {place}: {wrong}") from None
        if found is None:
            keys = (
                f"an object with {', '.join(list(row)[:8]) or 'nothing'}"
                if isinstance(row, dict)
                else type(row).__name__
            )
            raise DataError(
                f"{self._path}, {place}: expected OTLP/JSON, spans of an SDK, or a row of {', '.join(FORMATS)}; got {keys}"
            )
        if isinstance(row, dict):
            self.found_fields |= row.keys() & set(self._task_fields)
        yield from found

    def _gather(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._traces.setdefault(span.trace_id or "", []).append(span)

    def _values(self) -> Iterator[tuple[str, Any]]:
        """The JSON values of the file and where each stands. Lines are read one by one where each is a value."""
        opener = gzip.open if self._path.suffix == ".gz" else open
        with opener(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = orjson.loads(line)
                except orjson.JSONDecodeError as cause:
                    if number > 1:
                        raise DataError(f"{self._path}, line {number}: is not valid JSON: {cause}") from None
                    yield from self._whole((line + file.read()).decode())
                    return
                yield f"line {number}", value

    def _whole(self, text: str) -> Iterator[tuple[str, Any]]:
        decoder, at = json.JSONDecoder(), 0
        while at < len(text):
            if text[at].isspace() or text[at] == ",":
                at += 1
                continue
            try:
                value, after = decoder.raw_decode(text, at)
            except (json.JSONDecodeError, RecursionError) as cause:
                line = text.count("\n", 0, at) + 1
                raise DataError(f"{self._path}, line {line}: is not valid JSON: {cause}") from None
            yield f"line {text.count(chr(10), 0, at) + 1}", value
            at = after
