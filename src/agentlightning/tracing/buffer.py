"""SpanBuffer: the OpenTelemetry spans of one attempt that runs in this process, until they are delivered.

The tracer fills it, from any thread; the worker empties it. Bounded: an agent that opens spans in an endless loop must not
fill the worker's memory. Knows neither stores nor context variables.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agentlightning.store.base import BROKEN_SPANS
from agentlightning.tracing.intake import LARGEST_SPAN, LONGEST_TEXT, MOST_SPANS
from agentlightning.types import JSON, Span, SpanKind, SpanStatus

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

UNFINISHED = "agl.unfinished"
"""Attribute, true, of a span that was still open when its attempt ended."""

_KINDS: tuple[SpanKind, ...] = ("internal", "server", "client", "producer", "consumer")
_STATUSES: tuple[SpanStatus, ...] = ("unset", "ok", "error")


class SpanBuffer:
    """What is not delivered yet of one attempt's spans. At most `most` spans are kept of an attempt, the first ones."""

    def __init__(self, run_id: str, rollout_id: str, attempt: int, most: int = MOST_SPANS) -> None:
        self._run_id = run_id
        self._rollout_id = rollout_id
        self._attempt = attempt
        self._most = most
        self._lock = threading.Lock()
        self._open: dict[int, ReadableSpan] = {}
        self._ended: list[ReadableSpan] = []
        self._taken = 0
        self._broken: Counter[str] = Counter()
        self._notes = 0
        self._closed = False

    def start(self, span: ReadableSpan, span_id: int) -> None:
        """A span of this attempt has begun."""
        with self._lock:
            if not self._closed and len(self._open) < self._most:
                self._open[span_id] = span

    def end(self, span: ReadableSpan, span_id: int) -> None:
        """It has ended. What ends after the attempt is not kept: `close` has taken it as unfinished."""
        with self._lock:
            self._open.pop(span_id, None)
            if self._closed:
                return
            if self._taken + len(self._ended) < self._most:
                self._ended.append(span)
            else:
                self._broken["too_many"] += 1

    def close(self) -> None:
        """The attempt has ended: what is open is kept as it is, and nothing is added any more."""
        with self._lock:
            self._closed = True
            room = self._most - self._taken - len(self._ended)
            self._ended += list(self._open.values())[:room]
            self._open.clear()

    def take(self) -> list[Span]:
        """The spans that ended since it was last asked, as records; with them what had to be cut or left out, counted."""
        with self._lock:
            ended, self._ended = self._ended, []
            self._taken += len(ended)
        spans = [self._record(span) for span in ended]
        with self._lock:
            broken, self._broken = self._broken, Counter()
        if broken:
            spans.append(self._note(broken))
        return spans

    def count_lost(self, spans: int) -> None:
        """So many spans were taken and could not be delivered."""
        with self._lock:
            self._broken["undelivered"] += spans

    def _id(self, span_id: int) -> str:
        return f"{self._rollout_id}.{self._attempt}.{span_id:016x}"

    def _record(self, span: ReadableSpan) -> Span:
        context = span.context
        parent = span.parent
        started_ns = span.start_time or 0
        attributes = self._attributes(span)
        if span.end_time is None:
            attributes[UNFINISHED] = True
        return Span(
            id=self._id(context.span_id),
            run_id=self._run_id,
            rollout_id=self._rollout_id,
            attempt=self._attempt,
            name=span.name,
            parent_id=None if parent is None or not parent.is_valid else self._id(parent.span_id),
            attributes=attributes,
            started_ns=started_ns,
            finished_ns=max(started_ns, span.end_time or time.time_ns()),
            trace_id=f"{context.trace_id:032x}",
            kind=_KINDS[span.kind.value],
            status=_STATUSES[span.status.status_code.value],
            status_message=span.status.description or "",
            events=[
                {
                    "name": event.name,
                    "time_ns": event.timestamp,
                    "attributes": self._plain((event.attributes or {}).items()),
                }
                for event in span.events
            ],
        )

    def _attributes(self, span: ReadableSpan) -> JSON:
        attributes = self._plain((span.attributes or {}).items())
        scope = span.instrumentation_scope
        if scope is not None:
            attributes["scope.name"] = scope.name
        for name, value in span.resource.attributes.items():
            if not name.startswith("telemetry.sdk."):
                attributes[f"resource.{name}"] = _value(value)
        return attributes

    def _plain(self, given: Iterable[tuple[str, Any]]) -> JSON:
        """Attributes within the bounds of what other programs may send; what is cut is counted once a span."""
        found: JSON = {}
        left = LARGEST_SPAN
        cut = False
        for name, value in given:
            if isinstance(value, str):
                size = min(LONGEST_TEXT, left)
                if len(value) > size:
                    value, cut = f"{value[:size]}… [{len(value) - size} more characters]", True
                left -= min(len(value), size)
            found[name] = _value(value)
        if cut:
            with self._lock:
                self._broken["too_large"] += 1
        return found

    def _note(self, broken: Mapping[str, int]) -> Span:
        self._notes += 1
        now = time.time_ns()
        return Span(
            id=f"{self._rollout_id}.{self._attempt}.broken-in-process-{self._notes}",
            run_id=self._run_id,
            rollout_id=self._rollout_id,
            attempt=self._attempt,
            name=BROKEN_SPANS,
            attributes=dict(broken),
            started_ns=now,
            finished_ns=now,
        )


def _value(value: Any) -> Any:
    """The SDK keeps sequences as tuples, and text as bytes where it was given so."""
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
