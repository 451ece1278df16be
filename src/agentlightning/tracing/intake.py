"""Intake: from spans as they were received to the record's, of one attempt; whatever is broken is mended or lost by itself.

Driven by the gateway, one `Intake` an attempt, by the buffer of spans of this process (`mended`), and by whoever reads
traces from a file (`spans_of`). Pure: it is told the time.
What is counted, by cause:

    lost            undecodable       nothing of the span could be read
                    too_many          the attempt has its `most` spans, or `most_bytes` of them, already
    mended          absent_id         no usable span id: it gets one that follows from its content
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

from agentlightning.store.base import BROKEN_SPANS, UNKNOWN_ROUTE
from agentlightning.tracing.clocks import LATEST_NS, Clocks, Times, plain_times
from agentlightning.tracing.received import Received, ReceivedResource, ReceivedSpan
from agentlightning.types import JSON, Span

MOST_SPANS = 10_000
"""Spans of an attempt."""
MOST_BYTES = 128 * 1024 * 1024
"""What the spans of an attempt may say, all of them, in bytes: rewards, AIR and the command line read them at once."""
LONGEST_NAME = 1024
LONGEST_TEXT = 128 * 1024
"""Characters of one text of an attribute: messages of models are long, files are not for here."""
LARGEST_SPAN = 1024 * 1024
"""Bytes of a span's attributes and events, roughly."""
MOST_ITEMS = 4096
"""Attributes, with their items, and events of one span."""
DEEPEST = 32

LOST = frozenset({"undecodable", "too_many"})
"""Causes by which a span is lost; by the others it is mended."""

RESERVED = frozenset({BROKEN_SPANS, UNKNOWN_ROUTE})
"""Names of spans that stores and trainer look for: what they say is counted and told, so that nobody else may say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Whose spans these are."""

    run_id: str
    rollout_id: str
    attempt: int
    began_ns: int = 0
    """When the rollout did."""

    def span_id(self, digits: str) -> str:
        """`Span.id` of a span whose own id is these 16 hex digits."""
        return f"{self.rollout_id}.{self.attempt}.{digits}" if self.rollout_id else digits


@dataclass(slots=True, kw_only=True)
class Taken:
    """What became of some spans."""

    spans: list[Span] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        return sum(count for cause, count in self.broken.items() if cause in LOST)


class Mended(NamedTuple):
    """A span that can be recorded, whatever it was before."""

    span: Span
    causes: list[str]
    """What was wrong with it, each cause once."""
    size: int
    """Characters of its attributes and events, roughly."""


class Intake:
    """The spans of one attempt, of which `known` are recorded already."""

    def __init__(
        self, place: Place, known: Iterable[Span] = (), most: int = MOST_SPANS, most_bytes: int = MOST_BYTES
    ) -> None:
        self.place = place
        self.told = 0
        """How often it has been recorded that spans were broken."""
        self._most = most
        self._bytes_left = most_bytes
        self._digests: dict[str, bytes] = {}
        """By id."""
        self._parents: dict[str, str] = {}
        self._clocks = Clocks(place.began_ns)
        for span in known:
            if span.name in RESERVED:
                self.told += span.name == BROKEN_SPANS
            else:
                self._keep(span, *_digest_and_size(span))

    @property
    def count(self) -> int:
        """How many spans it knows."""
        return len(self._digests)

    def take(self, resources: Sequence[ReceivedResource], now_ns: int) -> Taken:
        """The spans to record, in the order in which they came; a span that was taken before is among them again."""
        taken = Taken()
        new: dict[str, Span] = {}
        for resource in resources:
            taken.broken.update(resource.wrong)
            shared = {f"resource.{name}": value for name, value in resource.attributes.items()}
            times = self._clocks.read(resource.spans, now_ns)
            for received, time in zip(resource.spans, times, strict=True):
                self._take(mended(received, time, shared, self.place), taken, new)
        self._cut_cycles(taken, new)
        return taken

    def _take(self, given: Mended, taken: Taken, new: dict[str, Span]) -> None:
        span, causes, _ = given
        digest, size = _digest_and_size(span)
        known = self._digests.get(span.id)
        if known is not None and known != digest:
            causes.append("duplicate_id")
            span = replace(span, id=self.place.span_id(digest.hex()))
            known = self._digests.get(span.id)
        if known is not None:  # sent again: it has the parent that it has, which may be none any more
            span = replace(span, parent_id=self._parents.get(span.id))
        elif len(self._digests) >= self._most or size > self._bytes_left:
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
                circle = [new[each] for each in list(path)[list(path).index(node) :] if each in new]
                if circle:  # none is new where two servers have each recorded a part of it: who reads it must cope
                    first = min(circle, key=lambda span: (span.started_ns, span.id))
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
        taken.broken.update(resource.wrong)
        shared = {f"resource.{name}": value for name, value in resource.attributes.items()}
        for each in resource.spans:
            span, causes, _ = mended(each, plain_times(each, now_ns), shared, place)
            taken.spans.append(span)
            taken.broken.update(causes)
    return taken


def mended(received: ReceivedSpan, times: Times, shared: JSON, place: Place) -> Mended:
    """The span as it can be recorded; `shared` are attributes of its resource."""
    causes = dict.fromkeys([*received.wrong, *times.causes])
    room = _Room()
    name = room.text(received.name, LONGEST_NAME) or "span"
    if name in RESERVED:
        causes["reserved_name"] = None
        name = f"span {name}"
    span = Span(
        id=place.span_id(received.span_id),
        run_id=place.run_id,
        rollout_id=place.rollout_id,
        attempt=place.attempt,
        name=name,
        parent_id=place.span_id(received.parent_id) if received.parent_id else None,
        attributes=room.attributes(received.attributes | shared),
        started_ns=times.started_ns,
        finished_ns=times.finished_ns,
        trace_id=received.trace_id or None,
        kind=received.kind,
        status=received.status,
        status_message=room.text(received.status_message, LONGEST_TEXT),
        events=[
            {
                "name": room.text(event["name"], LONGEST_NAME),
                "time_ns": _instant(event["time_ns"], times),
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
        digest, _ = _digest_and_size(span, str(received.started_ns), received.trace_id)
        span = replace(span, id=place.span_id(digest.hex()))
    return Mended(span, list(causes), LARGEST_SPAN - room.left)


def _instant(time_ns: int, times: Times) -> int:
    shifted_ns = time_ns + times.shift_ns
    return shifted_ns if 0 < time_ns <= LATEST_NS and 0 < shifted_ns <= LATEST_NS else times.finished_ns


def _digest_and_size(span: Span, *more: str) -> tuple[bytes, int]:
    """Eight bytes of what a span says, whatever its id, its place and the clock it went by; and how much it says."""
    events = [(event["name"], event["attributes"]) for event in span.events]
    said = [span.name, span.kind, span.status, span.status_message, span.finished_ns - span.started_ns, *more]
    packed = orjson.dumps([said, span.attributes, events], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(packed, digest_size=8).digest(), len(packed)


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
        if len(value) <= longest and len(value) <= self.left:
            self.left -= len(value)
            return value
        size = min(longest, max(0, self.left))
        self.left -= size
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
                key = self.text(name, LONGEST_NAME)  # before its value, which may take all that is left
                kept[key] = self._value(item, depth + 1)
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
