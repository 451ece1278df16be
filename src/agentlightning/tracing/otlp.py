"""OTLP/JSON: an ExportTraceServiceRequest to spans, before anybody says whose they are. Pure and lenient; knows no rollouts.

Driven by the gateway (what programs send) and by whoever reads a file of traces; `protobuf.py` reads into the same types and
writes both, `sanitize.py` makes `types.Span` of them. What a field should be and is not costs that field, never the span;
what is no span at all is counted as lost. https://opentelemetry.io/docs/specs/otlp says how JSON differs from protobuf's
usual mapping: ids are hex digits, numbers of 64 bits are text, enums are numbers.

    {"resourceSpans": [{"resource": {"attributes": […]}, "scopeSpans": [{"scope": {"name": …}, "spans": [
        {"traceId": "5b8e…", "spanId": "eee1…", "name": "chat", "startTimeUnixNano": "1544712660000000000", …}]}]}]}
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterator, Mapping, Sequence
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

WRONG = "wrong_type"
"""Cause by which a field was mended."""

KINDS: tuple[SpanKind, ...] = ("internal", "internal", "server", "client", "producer", "consumer")
"""By OTLP's number, of which 0 is unspecified."""

STATUSES: tuple[SpanStatus, ...] = ("unset", "ok", "error")
"""By OTLP's number."""


@dataclass(slots=True, kw_only=True)
class OtlpSpan:
    """One span; whatever could not be read has its default, and its cause is in `wrong`."""

    trace_id: str = ""
    """32 hex digits, or nothing."""
    span_id: str = ""
    """16 hex digits, or nothing."""
    parent_id: str = ""
    name: str = ""
    kind: SpanKind = "internal"
    started_ns: int = 0
    finished_ns: int = 0
    attributes: JSON = field(default_factory=dict)
    """Those of its scope under ``scope.…``."""
    status: SpanStatus = "unset"
    status_message: str = ""
    events: list[JSON] = field(default_factory=list)
    """{"name", "time_ns", "attributes"} each."""
    wrong: list[str] = field(default_factory=list)
    """Causes by which it was mended."""


@dataclass(slots=True, kw_only=True)
class OtlpResource:
    """Spans that one program sent."""

    attributes: JSON = field(default_factory=dict)
    spans: list[OtlpSpan] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Causes by which what its spans share, of the resource and its scopes, was mended."""


@dataclass(slots=True, kw_only=True)
class OtlpRequest:
    """Content of one request."""

    resources: list[OtlpResource] = field(default_factory=list)
    lost: int = 0
    """Spans, and groups of them, each as one, of which nothing could be read."""


def identifier(raw: bytes, size: int) -> str:
    """Hex digits of an id of `size` bytes; nothing where it is absent (of zeros) or of another size.

    >>> identifier(bytes.fromhex("00f067aa0ba902b7"), 8), identifier(bytes(8), 8)
    ('00f067aa0ba902b7', '')
    """
    return raw.hex() if len(raw) == size and any(raw) else ""


def read_json(body: bytes, max_spans: int | None = None) -> OtlpRequest:
    """The spans of a request's body. InputError where it is no JSON object, or has more spans than `max_spans`."""
    if max_spans is not None and (things := sum(map(body.count, (b"{", b"[", b'"')))) > MAX_MARKS:
        raise InputError(
            f"traces: expected at most {MAX_MARKS} braces, brackets and quotes, got {things}; send less at once"
        )
    return from_object(_loaded(body), max_spans)


def from_object(request: Any, max_spans: int | None = None) -> OtlpRequest:
    """The spans of a decoded ExportTraceServiceRequest, or of one of its ``resourceSpans``. InputError as above."""
    if not isinstance(request, dict):
        raise InputError("traces: expected a JSON object with resourceSpans")
    if "resourceSpans" not in request and "scopeSpans" in request:
        request = {"resourceSpans": [request]}
    received, counts = OtlpRequest(), [0, 0, 0]  # of resources, of scopes and of spans
    for group in _dicts(request.get("resourceSpans"), received):
        counts[0] += 1
        if max_spans is not None and counts[0] > max_spans:
            raise too_many(max_spans)
        resource = group.get("resource")
        wrong: list[str] = [] if isinstance(resource, dict | None) else [WRONG]
        shared = resource.get("attributes") if isinstance(resource, dict) else None
        found = OtlpResource(attributes=_attributes(shared, wrong))
        for scope_spans in _dicts(group.get("scopeSpans") or group.get("instrumentationLibrarySpans"), received):
            scope = _scope(scope_spans.get("scope"), wrong)
            spans = scope_spans.get("spans")
            counts[1] += 1
            counts[2] += len(spans) if isinstance(spans, list) else 0
            if max_spans is not None and max(counts) > max_spans:
                raise too_many(max_spans)
            found.spans += [_read(span, scope) for span in _dicts(spans, received)]
        found.wrong = wrong[:1]  # once for all that its spans share
        if found.spans or found.wrong:
            received.resources.append(found)
    return received


def too_many(max_spans: int) -> InputError:
    """Refuses a request of more spans, or groups of them: reading takes a hundred times the bytes of one that is empty."""
    return InputError(f"traces: expected at most {max_spans} spans in one request; send them in several")


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
    wrong: list[str] = []
    attributes = _attributes(given.get("attributes"), wrong)
    status, events = given.get("status"), given.get("events")
    if not isinstance(status, dict | None) or not isinstance(events, list | None):
        wrong.append(WRONG)
    status = status if isinstance(status, dict) else {}
    return OtlpSpan(
        trace_id=_identifier(given.get("traceId"), 16, wrong),
        span_id=_identifier(given.get("spanId"), 8, wrong),
        parent_id=_identifier(given.get("parentSpanId"), 8, wrong),
        name=text(given.get("name"), wrong),
        kind=known(given.get("kind"), KINDS, wrong, "SPAN_KIND_"),
        started_ns=time(given.get("startTimeUnixNano"), wrong),
        finished_ns=time(given.get("endTimeUnixNano"), wrong),
        attributes=attributes | scope if scope else attributes,
        status=known(status.get("code"), STATUSES, wrong, "STATUS_CODE_"),
        status_message=text(status.get("message"), wrong),
        events=[read for event in events if (read := _event(event, wrong))] if isinstance(events, list) else [],
        wrong=wrong,
    )


def _event(given: Any, wrong: list[str]) -> JSON:
    """Empty where it is none."""
    if not isinstance(given, dict):
        wrong.append(WRONG)
        return {}
    return {
        "name": text(given.get("name"), wrong),
        "time_ns": time(given.get("timeUnixNano"), wrong),
        "attributes": _attributes(given.get("attributes"), wrong),
    }


def _scope(given: Any, wrong: list[str]) -> JSON:
    """Attributes that tell of a scope."""
    if not isinstance(given, dict):
        wrong += [] if given is None else [WRONG]
        return {}
    told = {name: value for name in ("name", "version") if (value := text(given.get(name), wrong))}
    told |= _attributes(given.get("attributes"), wrong)
    return {f"scope.{name}": value for name, value in told.items()}


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


def _identifier(value: Any, size: int, wrong: list[str]) -> str:
    """Hex digits; numbers, and base64 as protobuf's usual mapping has it, are understood too."""
    if value is None or value == "":
        return ""
    try:
        raw = bytes.fromhex(value.removeprefix("0x")) if isinstance(value, str) else b""
    except ValueError:
        raw = b""
    if len(raw) == size:
        return identifier(raw, size)
    wrong.append(WRONG)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << (8 * size):
        return identifier(value.to_bytes(size, "big"), size)
    try:
        return identifier(base64.b64decode(value, validate=True), size) if isinstance(value, str) else ""
    except (ValueError, binascii.Error):
        return ""


def text(value: object, wrong: list[str]) -> str:
    """A text that can be written as UTF-8; a number as one."""
    if value is None or isinstance(value, str):
        return clean(value or "")
    wrong.append(WRONG)
    return str(value) if isinstance(value, int | float) else ""


def time(value: object, wrong: list[str]) -> int:
    """Nanoseconds; 0 where there are none."""
    if value is None:
        return 0
    if not isinstance(value, str | int) or isinstance(value, bool):
        wrong.append(WRONG)
    try:
        return int(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0
    except (ValueError, OverflowError):
        wrong.append(WRONG)
        return 0


def known(given: object, values: Sequence[K], wrong: list[str], prefix: str = "") -> K:
    """The value of an enum by its number, or by its name as protobuf's usual mapping has it; the first one by default."""
    if given is None:
        return values[0]
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(values):
        return values[given]
    name = given.removeprefix(prefix).lower() if isinstance(given, str) else ""
    found = next((value for value in values if value == name), None)
    if found is None and name != "unspecified":
        wrong.append(WRONG)
    return values[0] if found is None else found


def _attributes(given: Any, wrong: list[str], depth: int = 0) -> JSON:
    """Attributes by name."""
    if given is None:
        return {}
    if not isinstance(given, list):
        wrong.append(WRONG)  # a map is not OTLP's list of pairs, and still no riddle
        return plain(given, depth) if isinstance(given, dict) else {}
    found: JSON = {}
    for pair in given:
        if isinstance(pair, dict) and isinstance(pair.get("key"), str):
            found[clean(pair["key"])] = _value(pair.get("value"), wrong, depth)
        else:
            wrong.append(WRONG)
    return found


def _value(given: Any, wrong: list[str], depth: int) -> Any:
    """Returns the content of an AnyValue."""
    if given is None or given == {}:
        return None
    for name, value in given.items() if isinstance(given, dict) and depth <= MAX_DEPTH else ():
        match name:
            case "stringValue" | "bytesValue" if isinstance(value, str):
                return clean(value)
            case "boolValue" if isinstance(value, bool):
                return value
            case "intValue" | "doubleValue" if isinstance(value, str | int | float):
                try:
                    return number(int(value) if name == "intValue" else float(value))
                except (ValueError, OverflowError):
                    wrong.append(WRONG)
                    return clean(str(value))
            case "arrayValue" if isinstance(value, dict):
                items = value.get("values")
                return [_value(item, wrong, depth + 1) for item in items] if isinstance(items, list) else []
            case "kvlistValue" if isinstance(value, dict):
                return _attributes(value.get("values"), wrong, depth + 1)
    wrong.append(WRONG)
    return plain(given, depth)


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
