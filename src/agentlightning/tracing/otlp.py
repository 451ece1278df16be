"""OTLP/JSON: an ExportTraceServiceRequest to spans and back. Pure; lenient in what it reads, exact in what it writes.

Driven by the gateway (what programs send), by the exporter, and by whoever reads a file of traces. What a field should be
and is not costs that field, never the span; what is no span at all is counted as lost. https://opentelemetry.io/docs/specs/otlp
says how JSON differs from protobuf's usual mapping: ids are hex digits, numbers of 64 bits are text, enums are numbers.

    {"resourceSpans": [{"resource": {"attributes": […]}, "scopeSpans": [{"scope": {"name": …}, "spans": [
        {"traceId": "5b8e…", "spanId": "eee1…", "name": "chat", "startTimeUnixNano": "1544712660000000000", …}]}]}]}
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from agentlightning.errors import InputError
from agentlightning.tracing.otlp_types import KINDS, STATUSES, OtlpRequest, OtlpResource, OtlpSpan, identifier
from agentlightning.types import JSON, Span

MAX_DEPTH = 32
"""Levels of nesting that an attribute may have: what reads it is recursive."""


def read_json(body: bytes, max_spans: int | None = None) -> OtlpRequest:
    """The spans of a request's body. InputError where it is no JSON object, or has more spans than `max_spans`."""
    return from_object(_loaded(body), max_spans)


def from_object(request: Any, max_spans: int | None = None) -> OtlpRequest:
    """The spans of a decoded ExportTraceServiceRequest, or of one of its ``resourceSpans``. InputError as above."""
    if not isinstance(request, dict):
        raise InputError("traces: expected a JSON object with resourceSpans")
    if "resourceSpans" not in request and "scopeSpans" in request:
        request = {"resourceSpans": [request]}
    received, count = OtlpRequest(), 0
    for group in _dicts(request.get("resourceSpans"), received):
        resource = group.get("resource")
        attributes, fine = _attributes(resource.get("attributes") if isinstance(resource, dict) else None)
        found = OtlpResource(attributes=attributes)
        for scope_spans in _dicts(group.get("scopeSpans") or group.get("instrumentationLibrarySpans"), received):
            scope, sound = _scope(scope_spans.get("scope"))
            fine = fine and sound
            spans = scope_spans.get("spans")
            count += len(spans) if isinstance(spans, list) else 0
            if max_spans is not None and count > max_spans:
                raise too_many(max_spans)
            found.spans += [_read(span, scope) for span in _dicts(spans, received)]
        if not fine or not isinstance(resource, dict | None):
            found.wrong.append("wrong_type")
        received.resources.append(found)
    return received


def too_many(max_spans: int) -> InputError:
    """Refuses a request of more spans: reading takes a hundred times the bytes of a span that says nothing."""
    return InputError(f"traces: expected at most {max_spans} spans in one request; send them in several")


def write_json(spans: Iterable[Span], resource: Mapping[str, Any]) -> bytes:
    """The body of a request that sends these spans as those of one resource, each under its scope."""
    by_scope: dict[str, list[JSON]] = {}
    for span in spans:
        scope = span.attributes.get("scope.name")
        by_scope.setdefault(scope if isinstance(scope, str) else "agentlightning", []).append(_written(span))
    scopes = [{"scope": {"name": name}, "spans": found} for name, found in by_scope.items()]
    return orjson.dumps({"resourceSpans": [{"resource": {"attributes": _pairs(resource)}, "scopeSpans": scopes}]})


def hex_of(span_id: str) -> str:
    """The 16 hex digits of a `Span.id` of ours; nothing where it is of another form.

    >>> hex_of("0189.1.00f067aa0ba902b7"), hex_of("0189")
    ('00f067aa0ba902b7', '')
    """
    found = span_id.rpartition(".")[2]
    try:
        return identifier(bytes.fromhex(found), 8)
    except ValueError:
        return ""


# --- reading ----------------------------------------------------------------------------------------------------------


def _loaded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:  # halves of characters and NaN are JSON to many programs
        return json.loads(body.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise InputError("traces: expected JSON, as the content type says") from None


def _read(given: JSON, scope: JSON) -> OtlpSpan:
    span = OtlpSpan()
    span.trace_id = _identifier(given, "traceId", 16, span.wrong)
    span.span_id = _identifier(given, "spanId", 8, span.wrong)
    span.parent_id = _identifier(given, "parentSpanId", 8, span.wrong)
    span.name = _text(given, "name", span.wrong)
    span.started_ns = _time(given, "startTimeUnixNano", span.wrong)
    span.finished_ns = _time(given, "endTimeUnixNano", span.wrong)
    span.kind = _known(given.get("kind"), KINDS, "SPAN_KIND_", span.wrong)
    attributes, fine = _attributes(given.get("attributes"))
    span.attributes = attributes | scope if scope else attributes
    status = given.get("status")
    if isinstance(status, dict):
        span.status = _known(status.get("code"), STATUSES, "STATUS_CODE_", span.wrong)
        span.status_message = _text(status, "message", span.wrong)
    elif status is not None:
        fine = False
    events = given.get("events")
    for event in events if isinstance(events, list) else ():
        if isinstance(event, dict):
            attributes, sound = _attributes(event.get("attributes"))
            time_ns = _time(event, "timeUnixNano", span.wrong)
            span.events.append({"name": _text(event, "name", span.wrong), "time_ns": time_ns, "attributes": attributes})
            fine = fine and sound
        else:
            fine = False
    if not fine or (events is not None and not isinstance(events, list)):
        span.wrong.append("wrong_type")
    return span


def _scope(given: Any) -> tuple[JSON, bool]:
    """Attributes that tell of a scope, and whether all of it was as it should be."""
    if not isinstance(given, dict):
        return {}, given is None
    wrong: list[str] = []
    found = {f"scope.{name}": text for name in ("name", "version") if (text := _text(given, name, wrong))}
    attributes, fine = _attributes(given.get("attributes"))
    return found | {f"scope.{name}": value for name, value in attributes.items()}, fine and not wrong


def _dicts(given: Any, received: OtlpRequest) -> Iterator[JSON]:
    """The objects of a list; what is none is lost."""
    if not isinstance(given, list):
        received.lost += given is not None
        return
    for each in given:
        if isinstance(each, dict):
            yield each
        else:
            received.lost += 1


def _identifier(given: JSON, name: str, size: int, wrong: list[str]) -> str:
    """Hex digits; numbers, and base64 as protobuf's usual mapping has it, are understood too."""
    value = given.get(name)
    if value is None or value == "":
        return ""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << (8 * size):
        wrong.append("wrong_type")
        return identifier(value.to_bytes(size, "big"), size)
    if not isinstance(value, str):
        wrong.append("wrong_type")
        return ""
    try:
        raw = bytes.fromhex(value.removeprefix("0x"))
    except ValueError:
        raw = b""
    if len(raw) == size:
        return identifier(raw, size)
    wrong.append("wrong_type")
    try:
        return identifier(base64.b64decode(value, validate=True), size)
    except (ValueError, binascii.Error):
        return ""


def _text(given: JSON, name: str, wrong: list[str]) -> str:
    value = given.get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return clean(value)
    wrong.append("wrong_type")
    return clean(str(value)) if isinstance(value, int | float) else ""


def _time(given: JSON, name: str, wrong: list[str]) -> int:
    value = given.get(name)
    if value is None:
        return 0
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return int(value)
    except (ValueError, OverflowError):
        pass
    wrong.append("wrong_type")
    return 0


def _known(given: Any, values: tuple[Any, ...], prefix: str, wrong: list[str]) -> Any:
    """An enum by its number, or by its name as protobuf's usual mapping has it."""
    if given is None:
        return values[0]
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(values):
        return values[given]
    name = given.removeprefix(prefix).lower() if isinstance(given, str) else ""
    if name in values or name == "unspecified":
        return name if name in values else values[0]
    wrong.append("wrong_type")
    return values[0]


def _attributes(given: Any, depth: int = 0) -> tuple[JSON, bool]:
    """Attributes by name, and whether all of them were as they should be."""
    if given is None:
        return {}, True
    if isinstance(given, dict):  # not OTLP's list of pairs, and still no riddle
        return {clean(str(name)): plain(value, depth) for name, value in given.items()}, False
    if not isinstance(given, list):
        return {}, False
    found: JSON = {}
    fine = True
    for pair in given:
        if isinstance(pair, dict) and isinstance(pair.get("key"), str):
            value, sound = _value(pair.get("value"), depth)
            found[clean(pair["key"])] = value
            fine = fine and sound
        else:
            fine = False
    return found, fine


def _value(given: Any, depth: int) -> tuple[Any, bool]:
    """Returns the content of an AnyValue."""
    if given is None or given == {}:
        return None, True
    if not isinstance(given, dict) or depth > MAX_DEPTH:
        return plain(given, depth), False
    for name, value in given.items():
        match name:
            case "stringValue" | "bytesValue" if isinstance(value, str):
                return clean(value), True
            case "boolValue" if isinstance(value, bool):
                return value, True
            case "intValue" | "doubleValue" if isinstance(value, str | int | float):
                return number(value, whole=name == "intValue")
            case "arrayValue" if isinstance(value, dict):
                items = value.get("values")
                read = [_value(item, depth + 1) for item in items] if isinstance(items, list) else []
                return [item for item, _ in read], all(sound for _, sound in read)
            case "kvlistValue" if isinstance(value, dict):
                return _attributes(value.get("values"), depth + 1)
    return plain(given, depth), False


def number(value: str | float, *, whole: bool) -> tuple[int | float | str, bool]:
    """A number that JSON and every database take; text where it is none."""
    try:
        found = int(value) if whole else float(value)
    except (ValueError, OverflowError):
        return clean(str(value)), False
    if not math.isfinite(found):
        return str(found), True
    return found if isinstance(found, float) or -(2**63) <= found < 2**63 else str(found), True


def plain(value: Any, depth: int = 0) -> Any:
    """Any value as an attribute's: JSON that every database takes. What JSON does not know is None."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return number(value, whole=isinstance(value, int))[0]
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {clean(str(name)): plain(item, depth + 1) for name, item in value.items()}
    return [plain(item, depth + 1) for item in value] if isinstance(value, list | tuple) else None


def clean(value: str) -> str:
    """Text that can be written as UTF-8: halves of characters are replaced."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


# --- writing ----------------------------------------------------------------------------------------------------------


def _written(span: Span) -> JSON:
    written: JSON = {
        "traceId": span.trace_id or "",
        "spanId": hex_of(span.id),
        "name": span.name,
        "kind": KINDS.index(span.kind, 1),
        "startTimeUnixNano": str(span.started_ns),
        "endTimeUnixNano": str(span.finished_ns),
        "attributes": _pairs(span.attributes),
        "status": {"code": STATUSES.index(span.status)},
    }
    if span.status_message:
        written["status"]["message"] = span.status_message
    if span.parent_id and hex_of(span.parent_id):
        written["parentSpanId"] = hex_of(span.parent_id)
    if span.events:
        written["events"] = [
            {"name": event["name"], "timeUnixNano": str(event["time_ns"]), "attributes": _pairs(event["attributes"])}
            for event in span.events
        ]
    return written


def _pairs(attributes: Mapping[str, Any]) -> list[JSON]:
    return [{"key": name, "value": _any_value(value)} for name, value in attributes.items()]


def _any_value(value: Any) -> JSON:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case list() | tuple():
            return {"arrayValue": {"values": [_any_value(item) for item in value]}}
        case dict():
            return {"kvlistValue": {"values": _pairs(value)}}
        case _:
            return {}
