"""SpanSanitizer: turns the spans of one attempt, as they were received, into spans that every store takes.

Whatever is broken is repaired or dropped by itself. Driven by the gateway, one `SpanSanitizer` per attempt, by the buffer of
spans of this process (`sanitize`), and by readers of trace files (`sanitize_request`). Pure: the time is an argument.
Problems are counted by cause:

    dropped         undecodable       nothing of the span could be read
                    too_many          the attempt has its `max_spans` spans, or `max_bytes` of them, already
    repaired        absent_id         no usable span id: it gets one that follows from its content
                    duplicate_id      the id of a span that says something else: likewise
                    cycle             it would be its own ancestor: the earliest span of the circle loses its parent
                    wrong_type        a field is not what it should be: it has its default, or is read as what it could be
                    too_large         text, attributes or events beyond the bounds below are cut
                    reserved_name     the name of a span by which the gateway tells something: it gets a word before it
                    wrong_time        absent, ending before it began, or a day apart in a younger attempt: an instant
                    clock_skew        outside the attempt's life by a minute: shifted, with its clock's others, to end now

A span that is sent again is the same span: whatever is derived follows from the content. A parent that never came is no
fault: it may be sampled out, in another program, or still running; whoever builds a tree takes such a span for a root.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import orjson

from agentlightning.records import JSON, Span
from agentlightning.store.gateway_events import (
    BROKEN_SPANS,
    REFUSED_CALLS,
    SHADOW_CALL,
    UNKNOWN_ROUTE,
)
from agentlightning.tracing.clocks import MAX_TIME_NS, Clocks, Times, plain_times
from agentlightning.tracing.otlp import OtlpRequest, OtlpResource, OtlpSpan

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
MAX_DEPTH = 32

LOST = frozenset({"undecodable", "too_many"})
"""Causes by which a span is lost; by the others it is mended."""

RESERVED = frozenset({BROKEN_SPANS, REFUSED_CALLS, SHADOW_CALL, UNKNOWN_ROUTE})
"""Names of spans that stores, gateway and trainer look for: what they say holds, so that nobody else may say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOwner:
    """The attempt that spans belong to."""

    run_id: str
    rollout_id: str
    attempt: int
    began_ns: int = 0
    """Start of the rollout."""

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
        return sum(count for cause, count in self.broken.items() if cause in LOST)


class SanitizedSpan(NamedTuple):
    """A span that can be recorded, whatever it was before."""

    span: Span
    causes: list[str]
    """Its faults, each cause once."""
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
        self._parents: dict[str, str] = {}
        self._clocks = Clocks(owner.began_ns)
        for span in known:
            if span.name in RESERVED:
                self.told += span.name == BROKEN_SPANS
            else:
                self._keep(span, *_digest_and_size(span))

    @property
    def count(self) -> int:
        """Number of spans it knows."""
        return len(self._digests)

    def take(self, resources: Sequence[OtlpResource], now_ns: int) -> SanitizedSpans:
        """The spans to record, in the order in which they came; a span that was taken before is among them again."""
        taken = SanitizedSpans()
        new: dict[str, Span] = {}
        for resource in resources:
            taken.broken.update(resource.wrong)
            shared = {f"resource.{name}": value for name, value in resource.attributes.items()}
            times = self._clocks.read(resource.spans, now_ns)
            for received, time in zip(resource.spans, times, strict=True):
                self._take(sanitize(received, time, shared, self.owner), taken, new)
        self._cut_cycles(taken, new)
        return taken

    def _take(self, given: SanitizedSpan, taken: SanitizedSpans, new: dict[str, Span]) -> None:
        span, causes, _ = given
        digest, size = _digest_and_size(span)
        known = self._digests.get(span.id)
        if known is not None and known != digest:
            causes.append("duplicate_id")
            span = replace(span, id=self.owner.span_id(digest.hex()))
            known = self._digests.get(span.id)
        if known is not None:  # sent again: it has the parent that it has, which may be none any more
            span = replace(span, parent_id=self._parents.get(span.id))
        elif len(self._digests) >= self._max_spans or size > self._bytes_left:
            taken.broken["too_many"] += 1
            return
        else:
            self._keep(span, digest, size)
            new[span.id] = span
        taken.broken.update(causes)
        taken.spans.append(span)

    def _keep(self, span: Span, digest: bytes, size: int) -> None:
        self._digests[span.id] = digest
        self._bytes_left -= size
        if span.parent_id is not None:
            self._parents[span.id] = span.parent_id

    def _cut_cycles(self, taken: SanitizedSpans, new: Mapping[str, Span]) -> None:
        """Follow every new span's ancestors once; where that leads back, cut a new one's link: others are recorded."""
        done: set[str] = set()
        cut: set[str] = set()
        for start in new:
            path: dict[str, None] = {}
            node: str | None = start
            while node is not None and node not in done and node not in path:
                path[node] = None
                node = self._parents.get(node)
            if node is not None and node in path:
                circle = [new[each] for each in list(path)[list(path).index(node) :] if each in new]
                if circle:  # none is new where two servers have each recorded a part of it: who reads it must cope
                    first = min(circle, key=lambda span: (span.started_ns, span.id))
                    del self._parents[first.id]
                    cut.add(first.id)
            done |= path.keys()
        taken.broken["cycle"] += len(cut)
        taken.broken = +taken.broken
        taken.spans = [replace(span, parent_id=None) if span.id in cut else span for span in taken.spans]


def sanitize_request(received: OtlpRequest, now_ns: int = 0) -> SanitizedSpans:
    """Spans of no rollout (rollout_id and run_id are empty, ids are hex digits), as a file of traces has them."""
    owner = SpanOwner(run_id="", rollout_id="", attempt=0)
    taken = SanitizedSpans(broken=Counter({"undecodable": received.lost} if received.lost else {}))
    for resource in received.resources:
        taken.broken.update(resource.wrong)
        shared = {f"resource.{name}": value for name, value in resource.attributes.items()}
        for each in resource.spans:
            span, causes, _ = sanitize(each, plain_times(each, now_ns), shared, owner)
            taken.spans.append(span)
            taken.broken.update(causes)
    return taken


def sanitize(received: OtlpSpan, times: Times, shared: JSON, owner: SpanOwner) -> SanitizedSpan:
    """The span as it can be recorded; `shared` are attributes of its resource."""
    causes = dict.fromkeys([*received.wrong, *times.causes])
    limit = _SizeLimit()
    name = limit.text(received.name, MAX_NAME_CHARS) or "span"
    if name in RESERVED:
        causes["reserved_name"] = None
        name = f"span {name}"
    span = Span(
        id=owner.span_id(received.span_id),
        run_id=owner.run_id,
        rollout_id=owner.rollout_id,
        attempt=owner.attempt,
        name=name,
        parent_id=owner.span_id(received.parent_id) if received.parent_id else None,
        attributes=limit.attributes(received.attributes | shared),
        started_ns=times.started_ns,
        finished_ns=times.finished_ns,
        trace_id=received.trace_id or None,
        kind=received.kind,
        status=received.status,
        status_message=limit.text(received.status_message, MAX_TEXT_CHARS),
        events=[
            {
                "name": limit.text(event["name"], MAX_NAME_CHARS),
                "time_ns": _instant(event["time_ns"], times),
                "attributes": limit.attributes(event["attributes"]),
            }
            for event in received.events[:MAX_ITEMS]
            if limit.left > 0
        ],
    )
    if limit.cut or len(span.events) < len(received.events):
        causes["too_large"] = None
    if not received.span_id:
        causes["absent_id"] = None
        digest, _ = _digest_and_size(span, str(received.started_ns), received.trace_id)
        span = replace(span, id=owner.span_id(digest.hex()))
    return SanitizedSpan(span, list(causes), MAX_SPAN_BYTES - limit.left)


def _instant(time_ns: int, times: Times) -> int:
    shifted_ns = time_ns + times.shift_ns
    return shifted_ns if 0 < time_ns <= MAX_TIME_NS and 0 < shifted_ns <= MAX_TIME_NS else times.finished_ns


def _digest_and_size(span: Span, *more: str) -> tuple[bytes, int]:
    """Eight bytes of what a span says, whatever its id, its owner and the clock it went by; and how much it says."""
    events = [(event["name"], event["attributes"]) for event in span.events]
    said = [span.name, span.kind, span.status, span.status_message, span.finished_ns - span.started_ns, *more]
    packed = orjson.dumps([said, span.attributes, events], option=orjson.OPT_SORT_KEYS)
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
