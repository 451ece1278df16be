"""Gateway events: names of the spans that the gateway and a worker's tracing add to an attempt's record.

Stores count them when the attempt ends; rules.py makes warnings of them. Knows nothing of requests.
"""

from __future__ import annotations

from typing import Literal

from agentlightning.records import JSON

RESERVED_SPANS = "gateway."
"""Beginning of the names of these spans, which agents' spans may not have: stores, trainer and reports look for them."""

BROKEN_SPANS: Literal["gateway.broken_spans"] = "gateway.broken_spans"
"""Name of the span that says what was wrong with others: its attributes are counts by cause."""

BROKEN: Literal["broken spans"] = "broken spans"
"""The beginning of the warning about them."""

UNKNOWN_ROUTE: Literal["gateway.unknown_route"] = "gateway.unknown_route"
"""Name of the span that a request to a wrong path leaves, so that a rollout without calls can be explained."""

REFUSED_CALLS: Literal["gateway.refused_calls"] = "gateway.refused_calls"
"""Name of the span that says which model calls of an attempt the gateway refused: `fields` that it did not serve, `count`,
and an example of the `message`."""

FAILED_CALLS: Literal["gateway.failed_calls"] = "gateway.failed_calls"
"""Name of the span that says that a model call failed for want of a model (5xx, 429): what its agent did then is no giving
up. One for calls that fail in a row."""

LIMIT_REACHED: Literal["gateway.limit_reached"] = "gateway.limit_reached"
"""Name of the span that each limit leaves in an attempt when it is first reached."""

COUNTED_EVENTS = (BROKEN_SPANS, FAILED_CALLS, LIMIT_REACHED, REFUSED_CALLS, UNKNOWN_ROUTE)
"""Spans that count when an attempt ends."""

MAX_REASON_CHARS = 100
"""Bound of the fields that one refusal names."""

OUTGROWN: Literal["context_length_exceeded"] = "context_length_exceeded"
"""In the place of `fields`: the conversation has outgrown the model's context. Another try may stay below it, so that an
attempt which fails of it is retried as after any failure, and its rollout is not `refused`."""

NO_CALLS: Literal["no model call was recorded"] = "no model call was recorded"
"""The beginning of the warning of an attempt without a call."""

IGNORED_BASE_URL = "the agent did not use the base URL it was given"
"""The likely cause of it, where nothing is known."""


def broken_counts(attributes: JSON) -> dict[str, int]:
    """By cause, what a span named BROKEN_SPANS counts; attributes that are no counts are somebody else's."""
    return {cause: count for cause, count in attributes.items() if type(count) is int}


def refused_counts(attributes: JSON) -> dict[str, int]:
    """By fields, what a span named REFUSED_CALLS counts; attributes of another shape are somebody else's."""
    fields, count = attributes.get("fields"), attributes.get("count")
    return {fields[:MAX_REASON_CHARS]: count} if isinstance(fields, str) and type(count) is int and count > 0 else {}
