"""Authentication of callers of /api: the server key, tokens of the store, or nobody where a server has no key, whose callers
are then no web pages of other sites.

Driven by the API's middleware for every request, so that a token which was found is believed for a few seconds: so long it
may still open other servers after it was revoked, and not at all the server through which it was. Knows no methods; what a
caller may do is decided by roles.py.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import msgspec
from cachetools import TTLCache

from agentlightning.errors import ConfigError
from agentlightning.gateway.roles import Caller, RoleError
from agentlightning.store.audit import MAX_ACTOR_CHARS, Actor
from agentlightning.store.base import LightningStore
from agentlightning.store.http_transport import ACTOR_HEADER
from agentlightning.store.server_keys import KEY_VARIABLE, is_loopback
from agentlightning.store.tokens import Token, hash_of, is_token

Headers = Iterable[tuple[bytes, bytes]]

MADE_BY_THE_USER = (b"none", b"same-origin")
"""Values of Sec-Fetch-Site of requests that no other site made."""

TOKEN_AGE_S = 5.0
"""A token is read again after so long: the time within which its end is noticed everywhere."""
MAX_CACHED_TOKENS = 1024

_WANTED = "send `Authorization: Bearer` with AGL_SERVER_KEY, the server's key or a token of it (agl tokens create)"


class ServerKeyError(ConfigError):
    """Nobody knows the caller."""

    http_status = 401


class Authentication:
    """The callers of one server over an open store."""

    def __init__(self, store: LightningStore, server_key: str | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self.server_key = server_key
        self._now_ns = now_ns
        self._tokens: TTLCache[str, Token | None] = TTLCache(MAX_CACHED_TOKENS, TOKEN_AGE_S, time.monotonic)
        """By the hash of their secret; None where the store has none."""
        self._reading: dict[str, asyncio.Future[Token | None]] = {}
        """Reads under way: a crowd of requests with one token costs one."""

    async def caller(self, headers: Headers) -> Caller:
        """The caller of a request with these headers. Raises ServerKeyError."""
        key = presented_key(headers)
        if self.server_key is not None and hmac.compare_digest(key, self.server_key.encode()):
            return Caller(role="admin", actor=_on_behalf(headers, Actor(name="server key")))
        text = key.decode("latin-1")
        if is_token(text):
            return _caller(await self._valid(text), headers)
        if self.server_key is None:
            return Caller(role="admin", actor=_on_behalf(headers, Actor(name="somebody at a server without a key")))
        raise ServerKeyError(f"server key: missing or wrong; {_WANTED}")

    async def client(self, secret: str) -> Token:
        """The serving key with this secret. Raises ServerKeyError, and RoleError where a token is none."""
        token = await self._valid(secret)
        if token.role != "client":
            raise RoleError(
                f"token {token.id}: its role is {token.role}; a served model is asked with one of role client"
            )
        return token

    def forget(self) -> None:
        """A token was revoked, or got its run, through this server: each is read again when it comes next."""
        self._tokens.clear()
        self._reading.clear()

    async def _valid(self, secret: str) -> Token:
        secret_hash = hash_of(secret)
        token = self._tokens[secret_hash] if secret_hash in self._tokens else await self._read(secret_hash)
        if token is None:
            raise ServerKeyError(f"token: unknown to this server; {_WANTED}")
        if (ended := token.ended(self._now_ns())) is not None:
            when_ns = token.revoked_ns or token.expires_ns or 0
            when = f"{datetime.fromtimestamp(when_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
            raise ServerKeyError(f"token {token.id}: {ended} at {when}; have another made: agl tokens create")
        return token

    async def _read(self, secret_hash: str) -> Token | None:
        reading = self._reading.get(secret_hash)
        if reading is None:
            reading = self._reading[secret_hash] = asyncio.ensure_future(self._store.find_token(secret_hash))
        try:
            token = await asyncio.shield(reading)
        finally:
            # A read that `forget` disowned is not remembered: it may have begun before the change.
            current = self._reading.get(secret_hash) is reading
            if current and reading.done():
                del self._reading[secret_hash]
        if current:
            self._tokens[secret_hash] = token
        return token


def _caller(token: Token, headers: Headers) -> Caller:
    actor = Actor(
        name=f"token {token.name} ({token.id})",
        binds=token.id if token.role == "trainer" and token.run_id is None else None,
    )
    if token.role == "admin":
        actor = _on_behalf(headers, actor)
    return Caller(role=token.role, run_id=token.run_id, actor=actor, token_id=token.id)


def _on_behalf(headers: Headers, caller: Actor) -> Actor:
    """The actor for whom an admin, such as a further server over this one's store, says that it acts."""
    said = next((value for name, value in headers if name == ACTOR_HEADER.encode()), None)
    if said is None:
        return caller
    try:
        actor = msgspec.json.decode(said, type=Actor)
    except msgspec.DecodeError:
        return caller
    return Actor(name=f"{actor.name[:MAX_ACTOR_CHARS]}, through {caller.name}", binds=actor.binds)


# --- requests ---------------------------------------------------------------------------------------------------------


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
