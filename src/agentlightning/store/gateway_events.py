"""Gateway events: the names of the spans by which the gateway adds to an attempt's record what it saw, and the warnings that
stores make of them when the attempt ends.

The gateway and a worker's tracing write the spans; stores count them at the end of an attempt. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from agentlightning.records import JSON
from agentlightning.store.sentences import reason

BROKEN_SPANS: Literal["gateway.broken_spans"] = "gateway.broken_spans"
"""Name of the span that says what was wrong with others: its attributes are counts by cause."""

BROKEN: Literal["broken spans"] = "broken spans"
"""The beginning of the warning about them."""

UNKNOWN_ROUTE: Literal["gateway.unknown_route"] = "gateway.unknown_route"
"""Name of the span that a request to a wrong path leaves, so that a rollout without calls can be explained."""


def broken_counts(attributes: JSON) -> dict[str, int]:
    """By cause, what a span named BROKEN_SPANS counts; attributes that are no counts are somebody else's."""
    return {cause: count for cause, count in attributes.items() if type(count) is int}


def broken_warning(counts: Mapping[str, int]) -> str:
    """Returns the warning of a rollout about its broken spans.

    >>> broken_warning({"undecodable": 2, "too_large": 1})
    'broken spans, dropped or cut: too_large 1, undecodable 2'
    """
    causes = ", ".join(f"{cause} {count}" for cause, count in sorted(counts.items()))
    return reason("broken_spans", causes)


REFUSED_CALLS: Literal["gateway.refused_calls"] = "gateway.refused_calls"
"""Name of the span that says which model calls of an attempt the gateway refused: `fields` that it did not serve, `count`,
and an example of the `message`."""

MAX_REASON_CHARS = 100
"""Bound of the fields that one refusal names."""

MAX_REASONS = 16
"""Reasons of refused calls that a warning names."""


def refused_counts(attributes: JSON) -> dict[str, int]:
    """By fields, what a span named REFUSED_CALLS counts; attributes of another shape are somebody else's.

    >>> refused_counts({"fields": "context_management", "count": 2, "message": "…"})
    {'context_management': 2}
    """
    fields, count = attributes.get("fields"), attributes.get("count")
    return {fields[:MAX_REASON_CHARS]: count} if isinstance(fields, str) and type(count) is int and count > 0 else {}


OUTGROWN: Literal["context_length_exceeded"] = "context_length_exceeded"
"""In the place of `fields`: the conversation has outgrown the model's context. Another try may stay below it, so that an
attempt which fails of it is retried as after any failure, and its rollout is not `refused`."""


def refused_warning(counts: Mapping[str, int]) -> str:
    """Returns the warning of a rollout about its refused calls.

    >>> refused_warning({"context_management": 3})
    '3 calls refused: context_management 3'
    >>> refused_warning({"context_length_exceeded": 1, "tools": 1})
    '2 calls refused: context_length_exceeded 1, tools 1'
    """
    total = sum(counts.values())
    named = sorted(counts.items())[:MAX_REASONS]
    fields = ", ".join(f"{field} {count}" for field, count in named) + (", …" if len(counts) > len(named) else "")
    return reason("refused_calls", f"{total} call{'' if total == 1 else 's'}", fields)


NO_CALLS: Literal["no model call was recorded"] = "no model call was recorded"
"""The beginning of the warning of an attempt without a call."""

IGNORED_BASE_URL = "the agent did not use the base URL it was given"
"""The likely cause of it, where nothing is known."""
