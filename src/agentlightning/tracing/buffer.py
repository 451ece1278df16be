"""SpanBuffer: the OpenTelemetry spans of one attempt that runs in this process, until they are delivered.

The tracer fills it, from any thread; the worker empties it. Bounded: an agent that opens spans in an endless loop must not
fill the worker's memory. Knows neither stores nor context variables.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentlightning.records import JSON, Span
from agentlightning.store.gateway_events import BROKEN_SPANS, RESERVED_SPANS
from agentlightning.tracing.otlp import KINDS, STATUSES, OtlpSpan, clean, known, plain
from agentlightning.tracing.sanitize import (
    CUT,
    MAX_BYTES,
    MAX_SPANS,
    SpanOwner,
    resource_attributes,
    sanitize,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

UNFINISHED = "agl.unfinished"
"""Attribute, true, of a span that was still open when its attempt ended."""


class SpanBuffer:
    """The spans of one attempt that are not delivered yet: the first `max_spans`, up to `max_bytes`."""

    def __init__(
        self, run_id: str, rollout_id: str, attempt: int, max_spans: int = MAX_SPANS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._owner = SpanOwner(run_id=run_id, rollout_id=rollout_id, attempt=attempt)
        self._spans_left = max_spans
        self._bytes_left = max_bytes
        self._lock = threading.Lock()
        self._open: dict[int, ReadableSpan] = {}
        self._ended: list[ReadableSpan] = []
        self._broken: Counter[str] = Counter()
        self._notes = 0
        self._closed = False
        self._resource: tuple[Any, JSON] = None, {}
        """A resource, of which a process has one as a rule, and its attributes."""

    def start(self, span: ReadableSpan, span_id: int) -> None:
        """A span of this attempt has begun."""
        with self._lock:
            if not self._closed and len(self._open) < MAX_SPANS:
                self._open[span_id] = span

    def end(self, span: ReadableSpan, span_id: int) -> None:
        """It has ended. What ends after the attempt is not kept: `close` has taken it as unfinished."""
        with self._lock:
            self._open.pop(span_id, None)
            if not self._closed:
                self._keep(span)

    def close(self) -> None:
        """The attempt has ended: what is open is kept as it is, and nothing is added any more."""
        with self._lock:
            self._closed = True
            for span in self._open.values():
                self._keep(span)
            self._open.clear()

    def _keep(self, span: ReadableSpan) -> None:
        self._spans_left -= 1
        if self._spans_left >= 0:
            self._ended.append(span)
        else:
            self._broken["too_many"] += 1

    @property
    def pending(self) -> bool:
        """True if there is anything to take."""
        with self._lock:
            return bool(self._ended) or self._broken.total() > 0

    def take(self) -> list[Span]:
        """The spans that ended since it was last asked, as records; with them what had to be cut or left out, counted.
        Of one caller at a time."""
        with self._lock:
            ended, self._ended = self._ended, []
            causes, self._broken = self._broken, Counter()
        spans = []
        for each in ended:
            try:
                span, cut, size = sanitize(_received(each), self._shared(each.resource), self._owner)
            except Exception:  # an agent may put anything into a span: whatever that does, only this span is lost
                causes["undecodable"] += 1
                continue
            if span.name.startswith(RESERVED_SPANS):
                causes["reserved_name"] += 1
            elif size > self._bytes_left:
                causes["too_many"] += 1
            else:
                self._bytes_left -= size
                causes.update([CUT] * cut)
                spans.append(span)
        if causes:
            spans.append(self._note(causes))
        return spans

    def _shared(self, resource: Any) -> JSON:
        if self._resource[0] is not resource:
            own = {
                name: plain(one) for name, one in resource.attributes.items() if not name.startswith("telemetry.sdk.")
            }
            self._resource = resource, resource_attributes(own)
        return self._resource[1]

    def count_lost(self, spans: int) -> None:
        """So many spans were taken and could not be delivered."""
        with self._lock:
            self._broken["undelivered"] += spans

    def _note(self, broken: Mapping[str, int]) -> Span:
        self._notes += 1
        now = time.time_ns()
        return Span(
            id=self._owner.span_id(f"broken-in-process-{self._notes}"),
            run_id=self._owner.run_id,
            rollout_id=self._owner.rollout_id,
            attempt=self._owner.attempt,
            name=BROKEN_SPANS,
            attributes=dict(broken),
            started_ns=now,
            finished_ns=now,
        )


def _received(span: ReadableSpan) -> OtlpSpan:
    context, parent, scope = span.context, span.parent, span.instrumentation_scope
    attributes: JSON = plain(dict(span.attributes or {}))
    if scope is not None:
        attributes["scope.name"] = clean(scope.name)
    if span.end_time is None:
        attributes[UNFINISHED] = True
    return OtlpSpan(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id="" if parent is None or not parent.is_valid else f"{parent.span_id:016x}",
        name=clean(span.name),
        kind=known(_number_of(span.kind), KINDS[1:]),
        started_ns=int(span.start_time or 0),
        finished_ns=time.time_ns() if span.end_time is None else int(span.end_time),
        attributes=attributes,
        status=known(_number_of(span.status.status_code), STATUSES),
        status_message=clean(span.status.description or ""),
        events=[
            {"name": clean(one.name), "time_ns": int(one.timestamp), "attributes": plain(dict(one.attributes or {}))}
            for one in span.events
        ],
    )


def _number_of(given: object) -> object:
    """The number of a member of the SDK's enums, which count their members in the order of ours."""
    return getattr(given, "value", "none")
