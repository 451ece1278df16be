"""Spans as an exporter sent them: what JSON and protobuf are read into, before anybody says whose they are.

Driven by otlp.py and protobuf.py, which fill it, and by sanitize.py, which makes `types.Span` of it. Knows no rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentlightning.types import JSON, SpanKind, SpanStatus

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
