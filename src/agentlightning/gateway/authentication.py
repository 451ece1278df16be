"""Authentication of callers of /api: the server key, tokens of the store, or nobody where a server has no key.

Driven by the API's middleware for every request, so that a token which was found is believed for a few seconds: so long it
may still open other servers after it was revoked, and not at all the server through which it was. Knows no methods; what a
caller may do is decided by roles.py.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.gateway.access import Headers, presented_key
from agentlightning.gateway.roles import Caller, RoleError
from agentlightning.store.audit import MAX_ACTOR_CHARS, Actor
from agentlightning.store.base import LightningStore
from agentlightning.store.http_transport import ACTOR_HEADER
from agentlightning.store.tokens import Token, hash_of, is_token

TOKEN_AGE_S = 5.0
"""A token is read again after so long: the time within which its end is noticed everywhere."""
MAX_CACHED_TOKENS = 1024

_WANTED = "send `Authorization: Bearer` with AGL_SERVER_KEY, the server's key or a token of it (agl tokens create)"


class ServerKeyError(ConfigError):
    """Nobody knows the caller."""

    http_status = 401


@dataclass(frozen=True, slots=True)
class _Known:
    token: Token | None
    """None: the store has no such token."""
    read_s: float


class Authentication:
    """The callers of one server over an open store."""

    def __init__(self, store: LightningStore, server_key: str | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self.server_key = server_key
        self._now_ns = now_ns
        self._tokens: OrderedDict[str, _Known] = OrderedDict()
        """By the hash of their secret."""
        self._reading: dict[str, asyncio.Lock] = {}
        self._changes = 0
        """Times that tokens changed through this server: what was read before one is not remembered after it."""

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
        self._changes += 1
        self._tokens.clear()

    async def _valid(self, secret: str) -> Token:
        secret_hash = hash_of(secret)
        known = self._tokens.get(secret_hash)
        if known is None or time.monotonic() - known.read_s > TOKEN_AGE_S:
            known = await self._read(secret_hash)
        if known.token is None:
            raise ServerKeyError(f"token: unknown to this server; {_WANTED}")
        if (ended := known.token.ended(self._now_ns())) is not None:
            when_ns = known.token.revoked_ns or known.token.expires_ns or 0
            when = f"{datetime.fromtimestamp(when_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
            raise ServerKeyError(f"token {known.token.id}: {ended} at {when}; have another made: agl tokens create")
        return known.token

    async def _read(self, secret_hash: str) -> _Known:
        """A crowd of requests with one token costs one read."""
        asked_s = time.monotonic()
        lock = self._reading.setdefault(secret_hash, asyncio.Lock())
        try:
            async with lock:
                known = self._tokens.get(secret_hash)
                if known is None or known.read_s < asked_s:
                    changes, read_s = self._changes, time.monotonic()
                    known = _Known(await self._store.find_token(secret_hash), read_s)
                    if changes == self._changes:
                        self._tokens[secret_hash] = known
                        self._tokens.move_to_end(secret_hash)
        finally:
            if self._reading.get(secret_hash) is lock and not lock.locked():
                del self._reading[secret_hash]
        while len(self._tokens) > MAX_CACHED_TOKENS:
            self._tokens.popitem(last=False)
        return known


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
