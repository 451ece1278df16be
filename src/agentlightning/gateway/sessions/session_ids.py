"""Session ids: which conversation of which user a request belongs to, as the request itself says. Pure functions."""

from __future__ import annotations

from hashlib import sha256

from agentlightning.records import JSON

MAX_ID_CHARS = 200


def session_of_body(data: JSON) -> str | None:
    """The id in a request's body: ``metadata.session_id``, OpenAI's ``user``, Anthropic's ``metadata.user_id``.

    >>> session_of_body({"user": "anna"}), session_of_body({"metadata": {"user_id": "u-1"}}), session_of_body({})
    ('anna', 'u-1', None)
    """
    metadata = data.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    given = metadata.get("session_id"), data.get("user"), metadata.get("user_id")
    return next((one for one in given if isinstance(one, str) and one), None)


def shown_id(given: str) -> str:
    """The id as it is kept: what is longer than its bound, or cannot be shown, is kept by its hash.

    >>> shown_id("anna"), len(shown_id("x" * 1000)), len(shown_id("a b"))
    ('anna', 64, 64)
    """
    plain = given.isascii() and given.isprintable() and " " not in given and "/" not in given
    return given if plain and len(given) <= MAX_ID_CHARS else sha256(given.encode(errors="replace")).hexdigest()


def session_group(token_id: str, session_id: str) -> str:
    """The group of a session's rollouts: two keys never share one.

    >>> session_group("tok-1", "anna")
    'session:tok-1:anna'
    """
    return f"session:{token_id}:{session_id}"
