"""Access: loopback addresses, the server key, and the refusal of requests that a web page of another site makes.

Driven by the REST API of the store and by whoever starts a server. The environment's AGL_SERVER_KEY guards ``/api``.
Without it, a server that is reachable from elsewhere makes a key once and keeps it in a file that only its owner can read; a
server on loopback has none. It never says a key, only where it is. Knows neither attempts nor their keys.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path

from agentlightning.errors import ConfigError

KEY_VARIABLE = "AGL_SERVER_KEY"

Headers = Iterable[tuple[bytes, bytes]]

MADE_BY_THE_USER = (b"none", b"same-origin")
"""Values of Sec-Fetch-Site of requests that no other site made."""


@functools.lru_cache(maxsize=1024)
def is_loopback(address: str) -> bool:
    """True for an address, or the name of one, of this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("::ffff:127.0.0.1"), is_loopback("localhost")
    (True, True, True, True)
    >>> is_loopback("0.0.0.0"), is_loopback("::"), is_loopback("localhost.example.com"), is_loopback("127.0.0.1.nip.io")
    (False, False, False, False)
    """
    if address == "localhost" or address.endswith(".localhost"):
        return True
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def presents_key(headers: Headers, server_key: str) -> bool:
    """True where the request carries this server key as a bearer token. Compares in constant time."""
    return hmac.compare_digest(presented_key(headers), server_key.encode())


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


def key_path(store_url: str) -> Path:
    """The file of a store's server key: beside an SQLite file, else in the user's folder for states."""
    if store_url.startswith("sqlite:///"):
        database = store_url.removeprefix("sqlite:///").partition("?")[0]
        return Path(f"{database}.server-key")
    states = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(states) / "agentlightning" / "server-key"


def load_or_create_key(path: Path) -> str:
    """The key in the file, which is made with a new one if it does not exist. Raises ConfigError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return _read(path)
        key = f"sk-agl-server-{secrets.token_urlsafe(32)}"
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(key + "\n")
    except OSError as cause:
        raise ConfigError(
            f"{path}: the server key cannot be kept there ({cause.strerror}); set {KEY_VARIABLE}"
        ) from cause
    return key


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        status = os.fstat(descriptor)
        if sys.platform != "win32":
            if status.st_uid != os.geteuid():
                raise ConfigError(
                    f"{path}: the server key belongs to another user; remove the file or set {KEY_VARIABLE}"
                )
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{path}: the server key can be read by others; remove the file, so that a new key is made, or, if "
                    f"nobody has read it, run: chmod 600 {path}"
                )
        key = file.read(4096).strip()
    if not key:
        raise ConfigError(f"{path}: expected the server key, found nothing; remove the file, so that a new key is made")
    return key
