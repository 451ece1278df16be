"""Intake: from spans as they were received to the record's, of one attempt; whatever is broken is mended or lost by itself.

Driven by the gateway, one `Intake` an attempt, and by whoever reads traces from a file (`spans_of`). Pure: it is told
the time.
What is counted, by cause:

    lost            undecodable       nothing of the span could be read
                    too_many          the attempt has its `most` spans already
    mended          absent_id         no usable span id: it gets one that follows from its content
                    duplicate_id      the id of a span that says something else: likewise
                    cycle             it would be its own ancestor: the earliest span of the circle loses its parent
                    wrong_type        a field is not what it should be: it has its default, or is read as what it could be
                    too_large         text, attributes or events beyond the bounds below are cut
                    wrong_time        absent, or ending before it began: an instant
                    clock_skew        outside the attempt's life by a minute: shifted, with the attempt's others, to end now

A span that is sent again is the same span: whatever is derived follows from the content. A parent that never came is no
fault: it may be sampled out, in another program, or still running; whoever builds a tree takes such a span for a root.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from agentlightning.tracing.received import Received, ReceivedResource, ReceivedSpan
from agentlightning.types import JSON, Span

MOST_SPANS = 10_000
"""Spans of an attempt."""
LONGEST_NAME = 1024
LONGEST_TEXT = 128 * 1024
"""Characters of one text of an attribute: messages of models are long, files are not for here."""
LARGEST_SPAN = 1024 * 1024
"""Bytes of a span's attributes and events, roughly."""
MOST_ITEMS = 4096
"""Attributes, with their items, and events of one span."""
DEEPEST = 32
TOLERATED_SKEW_NS = 60 * 10**9
_LATEST_NS = 2**63 - 1

LOST = frozenset({"undecodable", "too_many"})
"""Causes by which a span is lost; by the others it is mended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Whose spans these are."""

    run_id: str
    rollout_id: str
    attempt: int
    began_ns: int = 0
    """When the rollout did."""


@dataclass(slots=True, kw_only=True)
class Taken:
    """What became of some spans."""

    spans: list[Span] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        return sum(count for cause, count in self.broken.items() if cause in LOST)


class Intake:
    """The spans of one attempt, of which `known` are recorded already."""

    def __init__(self, place: Place, known: Iterable[Span] = (), most: int = MOST_SPANS) -> None:
        self.place = place
        self._most = most
        self._prefix = f"{place.rollout_id}.{place.attempt}."
        self._digests: dict[str, bytes] = {}
        """By id."""
        self._parents: dict[str, str] = {}
        self._skew_ns: int | None = None
        for span in known:
            self._digests[span.id] = _digest(span)
            if span.parent_id is not None:
                self._parents[span.id] = span.parent_id

    def take(self, resources: Sequence[ReceivedResource], now_ns: int) -> Taken:
        """The spans to record, in the order in which they came; a span that was taken before is among them again."""
        taken = Taken()
        new: dict[str, Span] = {}
        for resource in resources:
            skew_ns = self._skew(resource.spans, now_ns)
            shared = {f"resource.{name}": value for name, value in resource.attributes.items()}
            for received in resource.spans:
                span, causes = _mended(received, shared, skew_ns, now_ns, self._span_id, self.place)
                span = self._distinct(span, causes)
                if span.id not in self._digests and len(self._digests) >= self._most:
                    taken.broken["too_many"] += 1
                    continue
                taken.broken.update(causes)
                if span.id not in self._digests:
                    self._digests[span.id] = _digest(span)
                    new[span.id] = span
                    if span.parent_id is not None:
                        self._parents[span.id] = span.parent_id
                taken.spans.append(span)
        self._cut_cycles(taken, new)
        return taken

    def _span_id(self, digits: str) -> str:
        return self._prefix + digits

    def _skew(self, spans: Sequence[ReceivedSpan], now_ns: int) -> Callable[[ReceivedSpan], int]:
        """By how much each span is to be shifted."""
        earliest_ns, latest_ns = self.place.began_ns - TOLERATED_SKEW_NS, now_ns + TOLERATED_SKEW_NS

        def outside(span: ReceivedSpan) -> bool:
            return span.started_ns > 0 and (span.started_ns < earliest_ns or _end(span) > latest_ns)

        if self._skew_ns is None and any(outside(span) for span in spans):
            self._skew_ns = now_ns - max(_end(span) for span in spans if outside(span))
        skew_ns = self._skew_ns or 0
        return lambda span: skew_ns if outside(span) else 0

    def _distinct(self, span: Span, causes: list[str]) -> Span:
        known = self._digests.get(span.id)
        if known is None:
            return span
        digest = _digest(span)
        if digest == known:
            return replace(span, parent_id=self._parents.get(span.id))  # the first one's, which may have been cut
        causes.append("duplicate_id")
        return replace(span, id=self._span_id(digest.hex()))

    def _cut_cycles(self, taken: Taken, new: Mapping[str, Span]) -> None:
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
                circle = list(path)[list(path).index(node) :]
                first = min((new[each] for each in circle if each in new), key=lambda span: (span.started_ns, span.id))
                del self._parents[first.id]
                cut.add(first.id)
            done |= path.keys()
        taken.broken["cycle"] += len(cut)
        taken.broken = +taken.broken
        taken.spans = [replace(span, parent_id=None) if span.id in cut else span for span in taken.spans]


def spans_of(received: Received, now_ns: int = 0) -> Taken:
    """Spans of no rollout (rollout_id and run_id are empty, ids are hex digits), as a file of traces has them."""
    place = Place(run_id="", rollout_id="", attempt=0)
    taken = Taken(broken=Counter({"undecodable": received.lost} if received.lost else {}))
    for resource in received.resources:
        shared = {f"resource.{name}": value for name, value in resource.attributes.items()}
        for each in resource.spans:
            span, causes = _mended(each, shared, lambda _: 0, now_ns, str, place)
            taken.spans.append(span)
            taken.broken.update(causes)
    return taken


def _mended(
    received: ReceivedSpan,
    shared: JSON,
    skew_ns: Callable[[ReceivedSpan], int],
    now_ns: int,
    span_id: Callable[[str], str],
    place: Place,
) -> tuple[Span, list[str]]:
    """The span, and what was wrong with it, each cause once."""
    causes = dict.fromkeys(received.wrong)
    room = _Room()
    shift_ns = skew_ns(received)
    if shift_ns:
        causes["clock_skew"] = None
    started_ns, finished_ns = received.started_ns + shift_ns, received.finished_ns + shift_ns
    if not (0 < received.started_ns <= received.finished_ns <= _LATEST_NS):
        causes["wrong_time"] = None
        usable = [time + shift_ns for time in (received.started_ns, received.finished_ns) if 0 < time <= _LATEST_NS]
        started_ns = finished_ns = usable[0] if usable else now_ns
    span = Span(
        id="",
        run_id=place.run_id,
        rollout_id=place.rollout_id,
        attempt=place.attempt,
        name=room.text(received.name, LONGEST_NAME) or "span",
        parent_id=span_id(received.parent_id) if received.parent_id else None,
        attributes=room.attributes(received.attributes | shared),
        started_ns=max(0, started_ns),
        finished_ns=max(0, finished_ns),
        trace_id=received.trace_id or None,
        kind=received.kind,
        status=received.status,
        status_message=room.text(received.status_message, LONGEST_TEXT),
        events=[
            {
                "name": room.text(event["name"], LONGEST_NAME),
                "time_ns": _instant(event["time_ns"], shift_ns, finished_ns),
                "attributes": room.attributes(event["attributes"]),
            }
            for event in received.events[:MOST_ITEMS]
            if room.left > 0
        ],
    )
    if room.cut or len(span.events) < len(received.events):
        causes["too_large"] = None
    if not received.span_id:
        causes["absent_id"] = None
    digits = received.span_id or _digest(span, str(received.started_ns), received.trace_id).hex()
    return replace(span, id=span_id(digits)), list(causes)


def _end(span: ReceivedSpan) -> int:
    return max(span.started_ns, span.finished_ns)


def _instant(time_ns: int, shift_ns: int, otherwise_ns: int) -> int:
    return time_ns + shift_ns if 0 < time_ns <= _LATEST_NS and 0 < time_ns + shift_ns <= _LATEST_NS else otherwise_ns


def _digest(span: Span, *more: str) -> bytes:
    """Eight bytes of what a span says, whatever its id, its place and the clock it went by."""
    events = [(event["name"], event["attributes"]) for event in span.events]
    said = [span.name, span.kind, span.status, span.status_message, span.finished_ns - span.started_ns, *more]
    packed = orjson.dumps([said, span.attributes, events], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(packed, digest_size=8).digest()


class _Room:
    """What one span may still take up."""

    def __init__(self) -> None:
        self.left = LARGEST_SPAN
        self.items = MOST_ITEMS
        self.cut = False

    def attributes(self, given: JSON) -> JSON:
        found = self._value(given, 0)
        return found if isinstance(found, dict) else {}

    def text(self, value: str, longest: int) -> str:
        size = min(longest, max(0, self.left))
        self.left -= len(value)
        if len(value) <= size:
            return value
        self.cut = True
        return f"{value[:size]}… [{len(value) - size} more characters]"

    def _value(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return self.text(value, LONGEST_TEXT)
        if not isinstance(value, dict | list):
            self.left -= 8
            return value
        if depth > DEEPEST:
            self.cut = True
            return None
        if isinstance(value, dict):
            kept = {}
            for name, item in value.items():
                if not self._more():
                    break
                kept[self.text(name, LONGEST_NAME)] = self._value(item, depth + 1)
            return kept
        items = []
        for item in value:
            if not self._more():
                break
            items.append(self._value(item, depth + 1))
        return items

    def _more(self) -> bool:
        """Whether another item fits."""
        self.items -= 1
        if self.items >= 0 and self.left > 0:
            return True
        self.cut = True
        return False
