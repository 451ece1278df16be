"""Spans as OpenTelemetry SDKs print them (`ReadableSpan.to_json`, console exporters, dumps of any-agent) to `Span`.
Pure.

Each dump writes the same span otherwise: ids as hex with or without 0x or as integers, times as ISO 8601 or
nanoseconds, the kind and the status with or without a prefix, the parent as an id or a context. A span without an id
is none; every other part that cannot be read is left at its default.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args

from agentlightning.records import JSON, Span, SpanKind, SpanStatus

LATEST_NS = 2**63 - 1


def is_sdk_span(value: Any) -> bool:
    """True where it looks like a span of an SDK."""
    return (
        isinstance(value, dict) and isinstance(value.get("context"), dict) and "name" in value and "attributes" in value
    )


def sdk_span(value: JSON) -> Span | None:
    """The span, with its raw ids and without a rollout; None where it has no id."""
    context: JSON = value.get("context") or {}
    span_id = hex_id(context.get("span_id"), 16)
    if span_id is None:
        return None
    parent = value.get("parent_id")
    if parent is None and isinstance(value.get("parent"), dict):
        parent = value["parent"].get("span_id")
    status: Any = value.get("status")
    code = status.get("status_code") if isinstance(status, dict) else None
    message = status.get("description") if isinstance(status, dict) else None
    attributes = value.get("attributes")
    events = value.get("events")
    return Span(
        id=span_id,
        run_id="",
        rollout_id="",
        attempt=0,
        name=str(value.get("name") or ""),
        parent_id=hex_id(parent, 16),
        attributes=dict(attributes) if isinstance(attributes, dict) else {},
        started_ns=nanoseconds(value.get("start_time")),
        finished_ns=nanoseconds(value.get("end_time")),
        trace_id=hex_id(context.get("trace_id"), 32),
        kind=_one_of(value.get("kind"), get_args(SpanKind), "internal"),
        status=_one_of(code, get_args(SpanStatus), "unset"),
        status_message=message if isinstance(message, str) else "",
        events=[_event(one) for one in events if isinstance(one, dict)] if isinstance(events, list) else [],
    )


def hex_id(value: Any, digits: int) -> str | None:
    """An id as hex digits; None for one that is missing, zero, too long or no id.

    >>> hex_id("0x1F", 4), hex_id(31, 4), hex_id("", 4), hex_id(0, 4)
    ('001f', '001f', None, None)
    """
    if isinstance(value, str):
        try:
            value = int(value.removeprefix("0x"), 16)
        except ValueError:
            return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 16**digits:
        return None
    return format(value, f"0{digits}x")


def nanoseconds(value: Any) -> int:
    """A time in nanoseconds since the epoch; 0 for one that is missing or no time.

    >>> nanoseconds("1970-01-01T00:00:01.5Z"), nanoseconds(7), nanoseconds("soon")
    (1500000000, 7, 0)
    """
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            return 0
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        since = moment - datetime(1970, 1, 1, tzinfo=UTC)
        return max(0, (since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000)
    known = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LATEST_NS
    return value if known else 0


def _event(value: JSON) -> JSON:
    attributes = value.get("attributes")
    return {
        "name": str(value.get("name") or ""),
        "time_ns": nanoseconds(value.get("timestamp")),
        "attributes": dict(attributes) if isinstance(attributes, dict) else {},
    }


def _one_of(value: Any, known: tuple[str, ...], default: Any) -> Any:
    """The name without its prefix: SpanKind.CLIENT, CLIENT and client are one."""
    name = str(value).rpartition(".")[2].lower()
    return name if name in known else default
