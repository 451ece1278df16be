"""OTLP: an ExportTraceServiceRequest to spans and back, in JSON and in protobuf, and what answers one. Pure.

Driven by the gateway (what programs send), the exporters and readers of trace files; `sanitize.py` makes `records.Span` of
what is read. A request of another shape is refused, a span that cannot be read is counted as lost. Protobuf is read and
written by way of its JSON; https://opentelemetry.io/docs/specs/otlp says how that differs from protobuf's usual mapping: ids
are hex digits, enums are numbers.

    {"resourceSpans": [{"resource": {"attributes": […]}, "scopeSpans": [{"scope": {"name": …}, "spans": [
        {"traceId": "5b8e…", "spanId": "eee1…", "name": "chat", "startTimeUnixNano": "1544712660000000000", …}]}]}]}
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from agentlightning.errors import InputError, MissingExtraError
from agentlightning.records import JSON, Span, SpanKind, SpanStatus
from agentlightning.runtime import json_text

K = TypeVar("K")

MAX_MARKS = 8_000_000
"""Braces, brackets and quotes in the JSON of somebody who is not trusted: each may become an object of 60 bytes."""
MAX_FIELDS = 500_000
"""Fields of such a request in protobuf, those of all its messages together: a message of two bytes becomes one of 64."""
MAX_DEPTH = 32
"""Levels of nesting that an attribute may have: what reads it is recursive."""
MAX_TIME_NS = 2**63 - 1
"""Latest time that every database accepts."""
IDS = ("traceId", "spanId", "parentSpanId")

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
        request = json_text.loads(body)
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
            raise _too_many(max_spans)
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


def _too_many(max_spans: int) -> InputError:
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


# --- writing --------------------------------------------------------------------------------------------------------------


def write_json(spans: Iterable[Span], resource: Mapping[str, Any]) -> bytes:
    """The body of a request that sends these spans as those of one resource, each under its scope."""
    return orjson.dumps(_request(spans, resource, str))


def _request(spans: Iterable[Span], resource: Mapping[str, Any], identifier: Callable[[str], str]) -> JSON:
    """`identifier` writes an id of hex digits."""
    scopes: dict[str, list[JSON]] = {}
    for span in spans:
        scope = str(span.attributes.get("scope.name") or "agentlightning")
        scopes.setdefault(scope, []).append(
            {
                "traceId": identifier(span.trace_id or ""),
                "spanId": identifier(hex_of(span.id)),
                "parentSpanId": identifier(hex_of(span.parent_id or "")),
                "name": span.name,
                "kind": KINDS.index(span.kind, 1),
                "startTimeUnixNano": str(span.started_ns),
                "endTimeUnixNano": str(span.finished_ns),
                "status": {"code": STATUSES.index(span.status), "message": span.status_message},
                "attributes": _pairs(span.attributes),
                "events": [
                    {"name": one["name"], "timeUnixNano": str(one["time_ns"]), "attributes": _pairs(one["attributes"])}
                    for one in span.events
                ],
            }
        )
    listed = [{"scope": {"name": name}, "spans": found} for name, found in scopes.items()]
    return {"resourceSpans": [{"resource": {"attributes": _pairs(resource)}, "scopeSpans": listed}]}


def _pairs(attributes: Mapping[str, Any]) -> list[JSON]:
    return [{"key": name, "value": _any_value(value)} for name, value in attributes.items()]


def _any_value(value: Any) -> JSON:
    match value:
        case bool():
            return {"boolValue": value}
        case int() if -(2**63) <= value < 2**63:
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list() | tuple():
            return {"arrayValue": {"values": [_any_value(item) for item in value]}}
        case dict():
            return {"kvlistValue": {"values": _pairs(value)}}
    return {} if value is None else {"stringValue": str(value)}


# --- protobuf -------------------------------------------------------------------------------------------------------------


def _schema() -> Any:
    """OTLP's messages, imported when the first request comes (0.1 s)."""
    try:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
    except ModuleNotFoundError as cause:
        raise MissingExtraError("opentelemetry-proto", "server") from cause
    return trace_service_pb2


def read_protobuf(body: bytes, max_spans: int | None = None) -> OtlpRequest:
    """The spans of a request's body. InputError where it is no such message, or has more spans than `max_spans`."""
    request = _schema().ExportTraceServiceRequest()
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError

    if max_spans is not None:
        _check_fields(body, request.DESCRIPTOR)
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise InputError(
            "traces: expected an ExportTraceServiceRequest in protobuf, as the content type says"
        ) from None
    counts = [len(scope.spans) for group in request.resource_spans for scope in group.scope_spans]
    if max_spans is not None and max(sum(counts), len(counts), len(request.resource_spans)) > max_spans:
        raise _too_many(max_spans)
    found = MessageToDict(request, use_integers_for_enums=True)
    for group in found.get("resourceSpans", ()):
        for scope in group.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                span |= {name: base64.b64decode(span[name]).hex() for name in IDS if name in span}
    return from_object(found)


def write_protobuf(spans: Iterable[Span], resource: Mapping[str, Any]) -> bytes:
    """The same as `write_json` in protobuf."""
    from google.protobuf.json_format import ParseDict

    request = _request(spans, resource, lambda digits: base64.b64encode(bytes.fromhex(digits)).decode())
    return bytes(ParseDict(request, _schema().ExportTraceServiceRequest()).SerializeToString())


def write_response(rejected: int, message: str) -> bytes:
    """The response to a request of which not everything was accepted (OTLP's partial success); empty where all was."""
    response = _schema().ExportTraceServiceResponse()
    if rejected or message:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = message
    return bytes(response.SerializeToString())


def read_response(body: bytes) -> tuple[int, str]:
    """The number of spans that a collector rejects, and why; nothing where the body is no answer of one."""
    from google.protobuf.message import DecodeError

    try:
        partial = _schema().ExportTraceServiceResponse.FromString(body).partial_success
    except DecodeError:
        return 0, ""
    return partial.rejected_spans, partial.error_message


def write_status(message: str) -> bytes:
    """A google.rpc.Status, which is how OTLP refuses: its field 2, the message, is also that of a partial success."""
    return bytes(_schema().ExportTracePartialSuccess(error_message=message).SerializeToString())


def _check_fields(body: bytes, kind: Any) -> None:
    """InputError where the messages of the body have more than `MAX_FIELDS` fields together."""
    if len(body) < 2 * MAX_FIELDS:
        return
    count, waiting = 0, [(kind, 0, len(body))]
    while waiting:
        kind, start, end = waiting.pop()
        for tag, value in _fields(body, start, end):
            count += 1
            if count > MAX_FIELDS:
                raise InputError(f"traces: expected at most {MAX_FIELDS} fields in one request; send them in several")
            field = None if value is None else kind.fields_by_number.get(tag)
            if value and field is not None and field.message_type is not None:
                waiting.append((field.message_type, value.start, value.stop))


def _fields(data: bytes, place: int, end: int) -> Iterator[tuple[int, range | None]]:
    """The fields of a message as far as the data can be followed: number, and the place of a value that has a length. Those
    of a group, of which OTLP has none, count as the message's, as do the marks around it."""
    while place < end:
        value = None
        key, place = _read_varint(data, place)
        match key & 7:
            case 0:
                _, place = _read_varint(data, place)
            case 1:
                place += 8
            case 5:
                place += 4
            case 2:
                size, place = _read_varint(data, place)
                value = range(place, min(place + size, end))
                place += size
            case 6 | 7:
                return
        yield key >> 3, value


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    """A number and the place after it; past the end where it is cut."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        value |= (data[place] & 127) << shift
        place += 1
        if not data[place - 1] & 128:
            return value, place
    return 0, len(data)
