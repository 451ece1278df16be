"""SpanSanitizer: turns the spans of one attempt, as they were received, into spans that every store takes.

Driven by the gateway, one `SpanSanitizer` per attempt, by the buffer of spans of this process (`sanitize`), and by readers
of trace files (`sanitize_request`). Pure. Problems are counted by cause:

    dropped     undecodable       it cannot be read: a field of the wrong type, no id, no start, or an end before it
                too_many          the attempt has its `max_spans` spans, or `max_bytes` of them, already
                duplicate_id      the id of a span that says something else
                reserved_name     the name of a span by which the gateway tells something
    cut         too_large         text, attributes or events beyond the bounds below

A span that is sent again is the same span. A parent that never came is no fault (it may be sampled out, in another program,
or still running), and parents may go round in a circle: whoever builds a tree copes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from agentlightning.records import JSON, Span
from agentlightning.store.gateway_events import (
    BROKEN_SPANS,
    REFUSED_CALLS,
    UNKNOWN_ROUTE,
)
from agentlightning.tracing.otlp import MAX_DEPTH, MAX_TIME_NS, OtlpRequest, OtlpResource, OtlpSpan

MAX_SPANS = 10_000
"""Spans of an attempt."""
MAX_BYTES = 128 * 1024 * 1024
"""Bound of all spans of an attempt together, in bytes: rewards, AIR and the command line read them at once."""
MAX_NAME_CHARS = 1024
MAX_TEXT_CHARS = 128 * 1024
"""Characters of one text of an attribute: messages of models are long, files are not for here."""
MAX_SPAN_BYTES = 1024 * 1024
"""Bytes of a span's attributes and events, roughly."""
MAX_ITEMS = 4096
"""Attributes, with their items, and events of one span."""

CUT = "too_large"
"""Cause by which a part of a span is lost; by all others the whole span is."""

RESERVED = frozenset({BROKEN_SPANS, REFUSED_CALLS, UNKNOWN_ROUTE})
"""Names of spans that stores, gateway and trainer look for: what they say holds, so that nobody else may say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOwner:
    """The attempt that spans belong to."""

    run_id: str
    rollout_id: str
    attempt: int

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


class SanitizedSpan(NamedTuple):
    """A span that can be recorded."""

    span: Span
    cut: bool
    size: int
    """Characters of its attributes and events, roughly."""


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
        self._digests: dict[str, bytes] = {}
        """By id."""
        for span in known:
            if span.name in RESERVED:
                self.told += span.name == BROKEN_SPANS
            else:
                self._keep(span.id, *_digest_and_size(span))

    @property
    def count(self) -> int:
        """Number of spans it knows."""
        return len(self._digests)

    def take(self, resources: Sequence[OtlpResource]) -> SanitizedSpans:
        """The spans to record, in the order in which they came; a span that was taken before is among them again."""
        taken = SanitizedSpans()
        for resource in resources:
            shared = resource_attributes(resource.attributes)
            for received in resource.spans:
                cause = self._take(received, shared, taken.spans)
                if cause is not None:
                    taken.broken[cause] += 1
        return taken

    def _take(self, received: OtlpSpan, shared: JSON, spans: list[Span]) -> str | None:
        """Add the span, or a part of it; returns what is wrong with it."""
        if received.name in RESERVED:
            return "reserved_name"
        span, cut, _ = sanitize(received, shared, self.owner)
        digest, size = _digest_and_size(span)
        known = self._digests.get(span.id)
        if known is None:
            if len(self._digests) >= self._max_spans or size > self._bytes_left:
                return "too_many"
            self._keep(span.id, digest, size)
        elif known != digest:
            return "duplicate_id"
        spans.append(span)
        return CUT if cut else None

    def _keep(self, span_id: str, digest: bytes, size: int) -> None:
        self._digests[span_id] = digest
        self._bytes_left -= size


def sanitize_request(received: OtlpRequest) -> SanitizedSpans:
    """Spans of no rollout (rollout_id and run_id are empty, ids are hex digits), as a file of traces has them."""
    owner = SpanOwner(run_id="", rollout_id="", attempt=0)
    taken = SanitizedSpans(broken=Counter({"undecodable": received.lost} if received.lost else {}))
    for resource in received.resources:
        shared = resource_attributes(resource.attributes)
        for each in resource.spans:
            span, cut, _ = sanitize(each, shared, owner)
            taken.spans.append(span)
            if cut:
                taken.broken[CUT] += 1
    return taken


def resource_attributes(attributes: JSON) -> JSON:
    """Attributes of a resource, as its spans carry them."""
    return {f"resource.{name}": value for name, value in attributes.items()}


def sanitize(received: OtlpSpan, shared: JSON, owner: SpanOwner) -> SanitizedSpan:
    """The span as it can be recorded; `shared` are attributes of its resource."""
    limit = _SizeLimit()
    span = Span(
        id=owner.span_id(received.span_id),
        run_id=owner.run_id,
        rollout_id=owner.rollout_id,
        attempt=owner.attempt,
        name=limit.text(received.name, MAX_NAME_CHARS) or "span",
        parent_id=owner.span_id(received.parent_id) if received.parent_id else None,
        attributes=limit.attributes(received.attributes | shared),
        started_ns=received.started_ns,
        finished_ns=received.finished_ns,
        trace_id=received.trace_id or None,
        kind=received.kind,
        status=received.status,
        status_message=limit.text(received.status_message, MAX_TEXT_CHARS),
        events=[
            {
                "name": limit.text(event["name"], MAX_NAME_CHARS),
                "time_ns": event["time_ns"] if 0 < event["time_ns"] <= MAX_TIME_NS else received.finished_ns,
                "attributes": limit.attributes(event["attributes"]),
            }
            for event in received.events[:MAX_ITEMS]
            if limit.left > 0
        ],
    )
    cut = limit.cut or len(span.events) < len(received.events)
    return SanitizedSpan(span, cut, MAX_SPAN_BYTES - limit.left)


def _digest_and_size(span: Span) -> tuple[bytes, int]:
    """Eight bytes of what a span says, whatever its id and its owner; and how much it says."""
    said = [span.name, span.kind, span.status, span.status_message, span.started_ns, span.finished_ns]
    packed = orjson.dumps([said, span.attributes, span.events], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(packed, digest_size=8).digest(), len(packed)


class _SizeLimit:
    """Bytes that one span may still take up."""

    def __init__(self) -> None:
        self.left = MAX_SPAN_BYTES
        self.items = MAX_ITEMS
        self.cut = False

    def attributes(self, given: JSON) -> JSON:
        found = self._value(given, 0)
        return found if isinstance(found, dict) else {}

    def text(self, value: str, max_chars: int) -> str:
        if len(value) <= max_chars and len(value) <= self.left:
            self.left -= len(value)
            return value
        size = min(max_chars, max(0, self.left))
        self.left -= size
        self.cut = True
        return f"{value[:size]}… [{len(value) - size} more characters]"

    def _value(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return self.text(value, MAX_TEXT_CHARS)
        if not isinstance(value, dict | list):
            self.left -= 8
            return value
        if depth > MAX_DEPTH:
            self.cut = True
            return None
        if isinstance(value, dict):
            kept = {}
            for name, item in value.items():
                if not self._more():
                    break
                key = self.text(name, MAX_NAME_CHARS)  # before its value, which may take all that is left
                kept[key] = self._value(item, depth + 1)
            return kept
        items = []
        for item in value:
            if not self._more():
                break
            items.append(self._value(item, depth + 1))
        return items

    def _more(self) -> bool:
        """Returns whether another item fits."""
        self.items -= 1
        if self.items >= 0 and self.left > 0:
            return True
        self.cut = True
        return False
