"""OTLP/JSON: an ExportTraceServiceRequest to spans, before anybody says whose they are. Pure; knows no rollouts.

Driven by the gateway (what programs send) and by readers of trace files; `protobuf.py` reads into the same types and writes
both encodings, `sanitize.py` makes `records.Span` of them. A request of another shape is refused, a span that cannot be read
is counted as lost. https://opentelemetry.io/docs/specs/otlp says how JSON differs from protobuf's usual mapping: ids are hex
digits, numbers of 64 bits are text, enums are numbers.

    {"resourceSpans": [{"resource": {"attributes": […]}, "scopeSpans": [{"scope": {"name": …}, "spans": [
        {"traceId": "5b8e…", "spanId": "eee1…", "name": "chat", "startTimeUnixNano": "1544712660000000000", …}]}]}]}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from agentlightning.errors import InputError
from agentlightning.records import JSON, SpanKind, SpanStatus

K = TypeVar("K")

MAX_MARKS = 8_000_000
"""Braces, brackets and quotes in the JSON of somebody who is not trusted: each may become an object of 60 bytes."""
MAX_DEPTH = 32
"""Levels of nesting that an attribute may have: what reads it is recursive."""
MAX_TIME_NS = 2**63 - 1
"""Latest time that every database accepts."""

KINDS: tuple[SpanKind, ...] = ("internal", "internal", "server", "client", "producer", "consumer")
"""By OTLP's number, of which 0 is unspecified."""

STATUSES: tuple[SpanStatus, ...] = ("unset", "ok", "error")
"""By OTLP's number."""


_UNREADABLE = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
"""Raised where JSON is not what OTLP has in its place."""


@dataclass(slots=True, kw_only=True)
class OtlpSpan:
    """One span as it was received."""

    span_id: str
    """16 hex digits."""
    trace_id: str = ""
    """32 hex digits, or nothing."""
    parent_id: str = ""
    name: str = ""
    kind: SpanKind = "internal"
    started_ns: int
    finished_ns: int
    attributes: JSON = field(default_factory=dict)
    """Those of its scope under ``scope.…``."""
    status: SpanStatus = "unset"
    status_message: str = ""
    events: list[JSON] = field(default_factory=list)
    """{"name", "time_ns", "attributes"} each."""

    def __post_init__(self) -> None:
        """ValueError where no store would take it."""
        if not self.span_id or not 0 < self.started_ns <= self.finished_ns <= MAX_TIME_NS:
            raise ValueError("a span has an id, a start and an end that is not before it")


@dataclass(slots=True, kw_only=True)
class OtlpResource:
    """Spans that one program sent."""

    attributes: JSON = field(default_factory=dict)
    spans: list[OtlpSpan] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class OtlpRequest:
    """Content of one request."""

    resources: list[OtlpResource] = field(default_factory=list)
    lost: int = 0
    """Spans that could not be read."""


def identifier(raw: bytes, size: int) -> str:
    """Hex digits of an id of `size` bytes; nothing where it is absent (empty or zeros). ValueError for another size.

    >>> identifier(bytes.fromhex("00f067aa0ba902b7"), 8), identifier(bytes(8), 8)
    ('00f067aa0ba902b7', '')
    """
    if raw and len(raw) != size:
        raise ValueError(f"expected an id of {size} bytes")
    return raw.hex() if any(raw) else ""


def read_json(body: bytes, max_spans: int | None = None) -> OtlpRequest:
    """The spans of a request's body. InputError where it is no such request, or has more spans than `max_spans`."""
    if max_spans is not None and (marks := sum(map(body.count, (b"{", b"[", b'"')))) > MAX_MARKS:
        raise InputError(
            f"traces: expected at most {MAX_MARKS} braces, brackets and quotes, got {marks}; send less at once"
        )
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise InputError("traces: expected JSON, as the content type says") from None
    return from_object(request, max_spans)


def from_object(request: Any, max_spans: int | None = None) -> OtlpRequest:
    """The spans of a decoded ExportTraceServiceRequest, or of one of its ``resourceSpans``. InputError as above."""
    if isinstance(request, dict) and "resourceSpans" not in request and "scopeSpans" in request:
        request = {"resourceSpans": [request]}
    received = OtlpRequest()
    try:
        groups = request.get("resourceSpans") or []
        scopes = [scope for group in groups for scope in group.get("scopeSpans") or []]
        counts = (len(groups), len(scopes), sum(len(scope.get("spans") or []) for scope in scopes))
        if max_spans is not None and max(counts) > max_spans:
            raise too_many(max_spans)
        for group in groups:
            found = OtlpResource(attributes=_attributes((group.get("resource") or {}).get("attributes")))
            for scope_spans in group.get("scopeSpans") or []:
                scope = _scope(scope_spans.get("scope") or {})
                for given in scope_spans.get("spans") or []:
                    try:
                        found.spans.append(_read(given, scope))
                    except _UNREADABLE:
                        received.lost += 1
            if found.spans:
                received.resources.append(found)
    except _UNREADABLE:
        raise InputError(
            "traces: expected a JSON object with resourceSpans, each with scopeSpans, each with spans"
        ) from None
    return received


def too_many(max_spans: int) -> InputError:
    """Refuses a request of more spans, or groups of them: reading takes a hundred times the bytes of one that is empty."""
    return InputError(f"traces: expected at most {max_spans} spans in one request; send them in several")


def hex_of(span_id: str) -> str:
    """The 16 hex digits of a `Span.id` of ours; nothing where it is of another form.

    >>> hex_of("0189.1.00f067aa0ba902b7"), hex_of("0189")
    ('00f067aa0ba902b7', '')
    """
    try:
        return identifier(bytes.fromhex(span_id.rpartition(".")[2]), 8)
    except ValueError:
        return ""


# --- reading: whatever is not as OTLP says raises ------------------------------------------------------------------------


def _read(given: JSON, scope: JSON) -> OtlpSpan:
    status = given.get("status") or {}
    return OtlpSpan(
        trace_id=identifier(bytes.fromhex(given.get("traceId") or ""), 16),
        span_id=identifier(bytes.fromhex(given["spanId"]), 8),
        parent_id=identifier(bytes.fromhex(given.get("parentSpanId") or ""), 8),
        name=_text(given.get("name")),
        kind=known(given.get("kind"), KINDS),
        started_ns=int(given["startTimeUnixNano"]),
        finished_ns=int(given["endTimeUnixNano"]),
        attributes=_attributes(given.get("attributes")) | scope,
        status=known(status.get("code"), STATUSES),
        status_message=_text(status.get("message")),
        events=[
            {
                "name": _text(event.get("name")),
                "time_ns": int(event.get("timeUnixNano") or 0),
                "attributes": _attributes(event.get("attributes")),
            }
            for event in given.get("events") or []
        ],
    )


def _scope(given: JSON) -> JSON:
    """Attributes that tell of a scope."""
    named = {name: _text(given[name]) for name in ("name", "version") if given.get(name)}
    return {f"scope.{name}": value for name, value in (named | _attributes(given.get("attributes"))).items()}


def known(given: object, values: Sequence[K]) -> K:
    """The value of an enum by its number; the first one where it is absent, or of a later release."""
    return values[given] if isinstance(given, int) and 0 <= given < len(values) else values[0]


def _text(value: object) -> str:
    if not isinstance(value, str | None):
        raise TypeError("expected text")
    return clean(value or "")


def _attributes(given: Any, depth: int = 0) -> JSON:
    """Attributes by name."""
    return {_text(pair["key"]): _value(pair.get("value") or {}, depth) for pair in given or []}


def _value(given: JSON, depth: int) -> Any:
    """Returns the content of an AnyValue."""
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    for name, value in given.items():
        match name:
            case "stringValue" | "bytesValue":
                return _text(value)
            case "boolValue" if isinstance(value, bool):
                return value
            case "intValue":
                return number(int(value))
            case "doubleValue":
                return number(float(value))
            case "arrayValue":
                return [_value(item, depth + 1) for item in value.get("values") or []]
            case "kvlistValue":
                return _attributes(value.get("values"), depth + 1)
        raise TypeError(f"no AnyValue: {name}")
    return None


def number(value: int | float) -> int | float | str:
    """A number that JSON and every database take; text where it is none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if -(2**63) <= value < 2**63 else str(value)


def plain(value: Any, depth: int = 0) -> Any:
    """Any value as an attribute's: JSON that every database takes. What JSON does not know is None."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return number(value)
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {clean(str(name)): plain(item, depth + 1) for name, item in value.items()}
    return [plain(item, depth + 1) for item in value] if isinstance(value, list | tuple) else None


def clean(value: str) -> str:
    """Text that can be written as UTF-8: halves of characters are replaced."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
