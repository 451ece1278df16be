"""SpanSanitizer: turns the spans of one attempt, as they were received, into spans that every store takes.

Driven by the gateway, one `SpanSanitizer` per attempt, by the tracer of this process (`sanitize`), and by readers of trace
files (`sanitize_request`). Pure. Problems are counted by cause:

    dropped     undecodable       it cannot be read: a field of the wrong type, no id, no start, or an end before it
                too_many          the attempt has its `max_spans` spans, or `max_bytes` of them, already
                reserved_name     the name of a span by which the gateway tells something
    cut         too_large         text, attributes or events beyond the bounds below

A span that is sent again is the same span: stores ignore ids that they have. A parent that never came is no fault, and
parents may go round in a circle: `span_tree.py` copes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentlightning.records import JSON, Span
from agentlightning.store.gateway_events import BROKEN_SPANS, RESERVED_SPANS
from agentlightning.tracing.otlp import MAX_TIME_NS, OtlpRequest, OtlpResource, OtlpSpan

MAX_SPANS = 10_000
"""Spans of an attempt."""
MAX_BYTES = 128 * 1024 * 1024
"""Bytes of all spans of an attempt: rewards, AIR and the command line read them at once."""
MAX_NAME_CHARS = 1024
MAX_TEXT_CHARS = 128 * 1024
"""Characters of one text of an attribute."""
MAX_SPAN_BYTES = 1024 * 1024
"""Bytes of a span's attributes and events, roughly."""

CUT = "too_large"
"""Cause by which a part of a span is lost; by all others the whole span is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOwner:
    """The attempt that spans belong to; that of a file's spans is empty."""

    run_id: str = ""
    rollout_id: str = ""
    attempt: int = 0

    def span_id(self, digits: str) -> str:
        """`Span.id` of a span whose own id is these 16 hex digits."""
        return f"{self.rollout_id}.{self.attempt}.{digits}" if self.rollout_id else digits


@dataclass(slots=True, kw_only=True)
class SanitizedSpans:
    """Result of sanitizing some spans."""

    spans: list[Span] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        return sum(count for cause, count in self.broken.items() if cause != CUT)


class SpanSanitizer:
    """The spans of one attempt, of which `known` are recorded already."""

    def __init__(
        self, owner: SpanOwner, known: Iterable[Span] = (), max_spans: int = MAX_SPANS, max_bytes: int = MAX_BYTES
    ) -> None:
        self.owner = owner
        self.told = 0
        """Number of records of broken spans."""
        self._max_spans = max_spans
        self._bytes_left = max_bytes
        self._ids: set[str] = set()
        for span in known:
            if span.name.startswith(RESERVED_SPANS):
                self.told += span.name == BROKEN_SPANS
            else:
                self._ids.add(span.id)
                self._bytes_left -= len(orjson.dumps([span.attributes, span.events]))

    @property
    def count(self) -> int:
        """Number of spans it knows."""
        return len(self._ids)

    def take(self, resources: Sequence[OtlpResource]) -> SanitizedSpans:
        """The spans to record, in the order in which they came; a span that was taken before is among them again."""
        taken = SanitizedSpans()
        for resource in resources:
            shared = resource_attributes(resource.attributes)
            for received in resource.spans:
                span, cut, size = sanitize(received, shared, self.owner)
                known = span.id in self._ids
                if span.name.startswith(RESERVED_SPANS):
                    taken.broken["reserved_name"] += 1
                elif not known and (len(self._ids) >= self._max_spans or size > self._bytes_left):
                    taken.broken["too_many"] += 1
                else:
                    self._ids.add(span.id)
                    self._bytes_left -= 0 if known else size
                    taken.spans.append(span)
                    taken.broken.update([CUT] * cut)
        return taken


def sanitize_request(received: OtlpRequest) -> SanitizedSpans:
    """Spans of no rollout (rollout_id and run_id are empty, ids are hex digits), as a file of traces has them."""
    taken = SanitizedSpans(broken=Counter({"undecodable": received.lost} if received.lost else {}))
    for resource in received.resources:
        shared = resource_attributes(resource.attributes)
        for each in resource.spans:
            span, cut, _ = sanitize(each, shared, SpanOwner())
            taken.spans.append(span)
            taken.broken.update([CUT] * cut)
    return taken


def resource_attributes(attributes: JSON) -> JSON:
    """Attributes of a resource, as its spans carry them."""
    return {f"resource.{name}": value for name, value in attributes.items()}


def sanitize(received: OtlpSpan, shared: JSON, owner: SpanOwner) -> tuple[Span, bool, int]:
    """The span as it can be recorded, whether it was cut, and its bytes; `shared` are attributes of its resource."""
    limit = _SizeLimit()
    span = Span(
        id=owner.span_id(received.span_id),
        run_id=owner.run_id,
        rollout_id=owner.rollout_id,
        attempt=owner.attempt,
        name=limit.text(received.name, MAX_NAME_CHARS) or "span",
        parent_id=owner.span_id(received.parent_id) if received.parent_id else None,
        attributes=limit.value(received.attributes | shared),
        started_ns=received.started_ns,
        finished_ns=received.finished_ns,
        trace_id=received.trace_id or None,
        kind=received.kind,
        status=received.status,
        status_message=limit.text(received.status_message),
        events=[
            {
                "name": limit.text(event["name"], MAX_NAME_CHARS),
                "time_ns": event["time_ns"] if 0 < event["time_ns"] <= MAX_TIME_NS else received.finished_ns,
                "attributes": limit.value(event["attributes"]),
            }
            for event in received.events
            if limit.more()
        ],
    )
    return span, limit.cut, MAX_SPAN_BYTES - limit.left


class _SizeLimit:
    """Bytes that one span may still take up."""

    def __init__(self) -> None:
        self.left = MAX_SPAN_BYTES
        self.cut = False

    def text(self, value: str, max_chars: int = MAX_TEXT_CHARS) -> str:
        size = min(max_chars, len(value), max(0, self.left))
        self.left -= size
        if size == len(value):
            return value
        self.cut = True
        return f"{value[:size]}… [{len(value) - size} more characters]"

    def value(self, value: Any) -> Any:
        """As much of it as fits. Names are taken before their values, which may take all that is left."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name, MAX_NAME_CHARS): self.value(item) for name, item in value.items() if self.more()}
        if isinstance(value, list):
            return [self.value(item) for item in value if self.more()]
        return value

    def more(self) -> bool:
        """True where another item fits."""
        self.left -= 8
        self.cut = self.cut or self.left <= 0
        return self.left > 0
