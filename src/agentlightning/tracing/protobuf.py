"""OTLP/protobuf: an ExportTraceServiceRequest to spans and back (back to JSON, too), and what answers one. Pure.

Driven by the gateway and the exporters, which import it when the first request comes (the schema costs 0.1 s).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from agentlightning.errors import InputError, MissingExtraError
from agentlightning.records import JSON, Span
from agentlightning.tracing.otlp import (
    KINDS,
    STATUSES,
    OtlpRequest,
    OtlpResource,
    OtlpSpan,
    hex_of,
    identifier,
    known,
    number,
    too_many,
)

try:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTracePartialSuccess,
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )
except ModuleNotFoundError as cause:
    raise MissingExtraError("opentelemetry-proto", "server") from cause


MAX_FIELDS = 1_000_000
"""Fields of a request from somebody who is not trusted, those of all its messages together."""


def read_protobuf(body: bytes, max_spans: int | None = None) -> OtlpRequest:
    """The spans of a request's body. InputError where it is no such message, or has more spans than `max_spans`."""
    if max_spans is not None:
        _check_fields(body)
    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise InputError(
            "traces: expected an ExportTraceServiceRequest in protobuf, as the content type says"
        ) from None
    if max_spans is not None:
        scopes = [len(scope.spans) for group in request.resource_spans for scope in group.scope_spans]
        if max(sum(scopes), len(scopes), len(request.resource_spans)) > max_spans:
            raise too_many(max_spans)
    received = OtlpRequest()
    for group in request.resource_spans:
        found = OtlpResource(attributes=_attributes(group.resource.attributes))
        for scope_spans in group.scope_spans:
            scope = _scope(scope_spans.scope)
            for span in scope_spans.spans:
                try:
                    found.spans.append(_read(span, scope))
                except ValueError:
                    received.lost += 1
        if found.spans:
            received.resources.append(found)
    return received


def write_protobuf(spans: Iterable[Span], resource: Mapping[str, Any]) -> bytes:
    """The body of a request that sends these spans as those of one resource, each under its scope."""
    return bytes(_request(spans, resource).SerializeToString())


def write_json(spans: Iterable[Span], resource: Mapping[str, Any]) -> bytes:
    """The same in JSON."""
    request = MessageToDict(_request(spans, resource), use_integers_for_enums=True)
    for scope in request["resourceSpans"][0].get("scopeSpans", ()):
        for span in scope["spans"]:  # OTLP has ids in hex digits, where protobuf's usual mapping has base64
            ids = ("traceId", "spanId", "parentSpanId")
            span |= {name: base64.b64decode(span[name]).hex() for name in ids if name in span}
    return orjson.dumps(request)


def _request(spans: Iterable[Span], resource: Mapping[str, Any]) -> Any:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    _fill(group.resource.attributes, resource)
    by_scope: dict[str, Any] = {}
    for span in spans:
        scope = str(span.attributes.get("scope.name") or "agentlightning")
        if scope not in by_scope:
            by_scope[scope] = group.scope_spans.add()
            by_scope[scope].scope.name = scope
        _write(span, by_scope[scope].spans.add())
    return request


def write_response(rejected: int, message: str) -> bytes:
    """Encodes the response to a request of which not everything was accepted (OTLP's partial success); empty where all
    was."""
    response = ExportTraceServiceResponse()
    if rejected or message:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = message
    return bytes(response.SerializeToString())


def read_response(body: bytes) -> tuple[int, str]:
    """Returns how many spans a collector rejects, and why; nothing where the body is no answer of one."""
    try:
        partial = ExportTraceServiceResponse.FromString(body).partial_success
    except DecodeError:
        return 0, ""
    return partial.rejected_spans, partial.error_message


def write_status(message: str) -> bytes:
    """A google.rpc.Status, which is how OTLP refuses: its field 2, the message, is also that of a partial success."""
    return bytes(ExportTracePartialSuccess(error_message=message).SerializeToString())


def _write(span: Span, made: Any) -> None:
    made.trace_id = bytes.fromhex(span.trace_id or "")
    made.span_id = bytes.fromhex(hex_of(span.id))
    made.parent_span_id = bytes.fromhex(hex_of(span.parent_id or ""))
    made.name, made.kind = span.name, KINDS.index(span.kind, 1)
    made.start_time_unix_nano, made.end_time_unix_nano = span.started_ns, span.finished_ns
    made.status.code, made.status.message = STATUSES.index(span.status), span.status_message
    _fill(made.attributes, span.attributes)
    for event in span.events:
        _fill(made.events.add(name=event["name"], time_unix_nano=event["time_ns"]).attributes, event["attributes"])


def _fill(pairs: Any, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        _set(pairs.add(key=name).value, value)


def _set(made: Any, value: Any) -> None:
    match value:
        case bool():
            made.bool_value = value
        case int() if -(2**63) <= value < 2**63:
            made.int_value = value
        case int():
            made.string_value = str(value)
        case float():
            made.double_value = value
        case str():
            made.string_value = value
        case list() | tuple():
            made.array_value.SetInParent()
            for item in value:
                _set(made.array_value.values.add(), item)
        case dict():
            made.kvlist_value.SetInParent()
            _fill(made.kvlist_value.values, value)


def _read(span: Any, scope: JSON) -> OtlpSpan:
    return OtlpSpan(
        trace_id=identifier(span.trace_id, 16),
        span_id=identifier(span.span_id, 8),
        parent_id=identifier(span.parent_span_id, 8),
        name=span.name,
        kind=known(span.kind, KINDS),
        started_ns=span.start_time_unix_nano,
        finished_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes) | scope,
        status=known(span.status.code, STATUSES),
        status_message=span.status.message,
        events=[
            {"name": event.name, "time_ns": event.time_unix_nano, "attributes": _attributes(event.attributes)}
            for event in span.events
        ],
    )


def _scope(scope: Any) -> JSON:
    found = {f"scope.{name}": getattr(scope, name) for name in ("name", "version") if getattr(scope, name)}
    return found | {f"scope.{name}": value for name, value in _attributes(scope.attributes).items()}


def _attributes(pairs: Iterable[Any]) -> JSON:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind is None:
        return None
    plain = getattr(value, kind)
    if isinstance(plain, bytes):
        return base64.b64encode(plain).decode()
    return number(plain) if isinstance(plain, float) else plain


# --- a request that would take far more memory than it has bytes -------------------------------------------------------


def _check_fields(body: bytes) -> None:
    """InputError where the messages of the body have more than `MAX_FIELDS` fields together: protobuf makes an object of 64
    bytes of a message of two."""
    if len(body) < 2 * MAX_FIELDS:
        return
    count, waiting = 0, [(ExportTraceServiceRequest.DESCRIPTOR, 0, len(body))]
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
    """The fields of a message, as far as the data can be followed: number, and the place of a value that has a length.

    The fields of a group, of which OTLP has none, count as the message's, as do the marks around it.
    """
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
            return 0, len(data)
        value |= (data[place] & 127) << shift
        place += 1
        if not data[place - 1] & 128:
            return value, place
    return 0, len(data)
