"""Unsupported parameters of a request: refused together in one answer, or dropped and named in a response header.

Driven by policy/calls.py, which collects them and knows the run's `agent.unsupported_params`. Knows no protocol: fields come
by the paths that the agent gave them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentlightning.protocols.base import ApiError, short
from agentlightning.records import JSON

MAX_NAMED = 20
"""Fields that an error names with their values; a request may have thousands."""

MAX_HEADER_BYTES = 1024
"""Bound of the header that names dropped fields: clients and proxies take headers of some thousand bytes in all."""


def unsupported_error(unsupported: JSON, refused: Mapping[str, str]) -> ApiError:
    """The refusal of all these fields: those that a setting lets a run ignore, and those that nothing makes it serve, which
    say why."""
    sentences = [f"{name}: {why}" for name, why in list(refused.items())[:MAX_NAMED]]
    if unsupported:
        verb, they, them = ("is", "it", "it") if len(unsupported) == 1 else ("are", "they", "them")
        sentences.append(
            f"{_named(unsupported)} {verb} not supported, because {they} would change what the trained policy reads or "
            f'samples; leave {them} out, or let the run ignore {them} (agent.unsupported_params = "drop")'
        )
    fields = (*refused, *unsupported)
    return ApiError("; ".join(sentences), param=fields[0], code="unsupported_value", fields=fields)


def _named(given: JSON) -> str:
    named = ", ".join(f"{name}: {short(given[name])}" for name in list(given)[:MAX_NAMED])
    return f"{named} and {len(given) - MAX_NAMED} more" if len(given) > MAX_NAMED else named


def ignored_header(names: Iterable[str]) -> bytes:
    """The value of the header that names dropped fields; safe in a header whatever the names hold, and bounded.

    >>> ignored_header(["top_k", "a, b\\r\\nX: y"])
    b'top_k, a%2C b%0D%0AX: y'
    """
    value = b""
    for name in names:
        safe = b"".join(_safe(char) for char in name)
        if len(value) + len(safe) + len(b", , ...") > MAX_HEADER_BYTES:
            return value + (b", " if value else b"") + b"..."
        value += (b", " if value else b"") + safe
    return value


def _safe(char: str) -> bytes:
    """A character that a header may hold and that does not end a name; others percent-encoded, as in URLs."""
    if " " <= char <= "~" and char not in ",%":
        return char.encode()
    return b"".join(b"%%%02X" % byte for byte in char.encode("utf-8", "replace"))
