"""Trace context of a request: the span within which an agent calls, and the name that baggage gives the agent. Pure.

Driven by reply.py, which reads a request's headers. W3C Trace Context (``traceparent: 00-{trace}-{span}-{flags}``) and W3C
Baggage (``baggage: agl.agent=writer,other=x``) are what every OpenTelemetry instrumentation of an HTTP client sends.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

LONGEST_AGENT = 200

AGENT_NAMES = ("agl.agent", "gen_ai.agent.name")
"""Keys of baggage that name the agent, the first that is there."""

LONGEST_BAGGAGE = 8192
"""As W3C bounds it."""

_TRACEPARENT = re.compile(
    rb"\s*[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?\s*", re.DOTALL
)


def parent_span(traceparent: bytes, rollout_id: str, attempt: int) -> str | None:
    """Id, as `Span.id` has it, of the span that a request of this attempt was made in; None where none is named.

    >>> parent_span(b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "abc", 1)
    'abc.1.00f067aa0ba902b7'
    """
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return f"{rollout_id}.{attempt}.{match[1].decode()}" if match is not None else None


def baggage_agent(baggage: bytes) -> str | None:
    """The agent's name by the request's baggage, without characters that cannot be shown: no database takes all of them.

    >>> baggage_agent(b"user=1, agl.agent=SQL%20writer;scope=run")
    'SQL writer'
    """
    found: dict[str, str] = {}
    for member in baggage[:LONGEST_BAGGAGE].decode("latin-1").split(","):
        key, given, rest = member.partition("=")
        if given and key.strip() in AGENT_NAMES:
            name = "".join(filter(str.isprintable, unquote(rest.partition(";")[0].strip())))
            found.setdefault(key.strip(), name[:LONGEST_AGENT].strip())
    return next((found[key] for key in AGENT_NAMES if found.get(key)), None)
