"""Access: the key of a request, and the refusal of requests that a web page of another site makes.

Driven by the REST API of the store and by the receiver of traces. Knows neither attempts nor their keys.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.store.server_keys import KEY_VARIABLE, is_loopback

Headers = Iterable[tuple[bytes, bytes]]

MADE_BY_THE_USER = (b"none", b"same-origin")
"""Values of Sec-Fetch-Site of requests that no other site made."""


def presented_key(headers: Headers) -> bytes:
    """The bearer token of a request; empty where it has none."""
    presented = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            if scheme.lower() == b"bearer":
                presented = credentials.strip()
    return presented


def cross_site_reason(method: str, headers: Headers) -> str | None:
    """The reason why a request to a server without a key could come from a web page in the user's browser; None if it
    cannot.

    A page can make a browser on this machine send requests to loopback. It cannot choose the Host header (its own name,
    even where that name resolves to loopback), hide its Origin, or send JSON or msgpack without asking first.
    """
    given = dict(headers)
    if b"x-forwarded-for" in given or b"forwarded" in given:
        return f"X-Forwarded-For: a server without a key is for its own machine, not behind a proxy; set {KEY_VARIABLE}"
    host = given.get(b"host", b"").decode("latin-1")
    if not is_loopback(_name(host)):
        return f"Host: expected a loopback name or address, because this server has no key, got {host[:80]!r}"
    origin = given.get(b"origin", b"").decode("latin-1")
    if origin and origin.partition("://")[2] != host:
        return f"Origin: expected none or http://{host}, because this server has no key, got {origin[:80]!r}"
    if given.get(b"sec-fetch-site", b"none") not in MADE_BY_THE_USER:
        return "Sec-Fetch-Site: a page of another site may not use a server without a key"
    if method not in ("GET", "HEAD"):
        content_type = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if content_type not in (b"application/json", b"application/msgpack"):
            return f"Content-Type: expected application/json, got {content_type[:80].decode('latin-1')!r}"
    return None


def _name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> _name("localhost:80"), _name("[::1]:80"), _name("::1")
    ('localhost', '::1', '::1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]
