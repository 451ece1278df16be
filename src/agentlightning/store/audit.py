"""The context of a call of a store's method: the actor, whose acts the audit log keeps, and the request, which happens once.

Set by servers around the call (`acting_as`, `requested`), read by the stores. An entry of the log is written in the
transaction of the act and never changed. So is the outcome of a request, as a row (key, digest, outcome): a request that
comes again, after a time-out or a crash, through whatever server, is answered with it. Rows are kept for longer than any
client goes on sending.
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import hmac
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from agentlightning.errors import ConflictError
from agentlightning.records import JSON, Resource

MAX_ACTOR_CHARS = 200
MAX_IDS_NAMED = 20  # rollouts that one entry names; of more it gives the number
AUDITED = frozenset(
    {"cancel", "create_token", "put_alias", "put_model", "delete_runs", "drop_records", "put_resources", "revoke_token"}
    | {"update_run"}
)
"""Methods that write entries."""
AUDITED_KINDS = frozenset({"policy", "external", "prompt_template", "routes"})
"""Kinds of resources that decide where agents' requests go, and what agents are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Something that was done, and by whom."""

    seq: int  # counts up, by one at least: the cursor of `audit`
    created_ns: int
    actor: str
    """``token NAME (ID)``, ``server key``, ``local user NAME``; behind a further server, as that server says."""
    action: str  # the store's method
    subject: str  # id of what it was done to: a run, a token, a resource's name
    run_id: str | None
    detail: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The caller of a store's methods."""

    name: str
    binds: str | None = None  # id of a token without a run: the first run that it creates becomes its run


_actor: ContextVar[Actor | None] = ContextVar("actor", default=None)


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """Around calls of a store's methods: they are done for this actor."""
    previous = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(previous)


def declared_actor() -> Actor | None:
    """The actor of `acting_as`; None outside of it."""
    return _actor.get()


def current_actor() -> Actor:
    """The actor for whom a method is called now: that of `acting_as`, else the user of this process."""
    return _actor.get() or Actor(name=f"local user {_user()}")


def noted_value(resource: Resource) -> JSON:
    """The detail of an entry about a resource besides its kind and version: the whole value of routes."""
    return dict(resource.value) if resource.kind == "routes" else {}


def named_ids(ids: list[str]) -> JSON:
    """The detail of an entry about rollouts: their number, and the first of them."""
    return {"rollouts": len(ids), "ids": sorted(ids)[:MAX_IDS_NAMED]}


@functools.cache
def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        return str(os.getuid())


# --- requests ---------------------------------------------------------------------------------------------------------

REQUEST_KEPT_S = 900.0  # seconds for which the outcome of a request is remembered


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a client."""

    name: str  # the client's, with whatever else tells requests apart: the caller and the method
    digest: bytes  # of its body: the same name for something else is refused
    suffix: str = ""

    @property
    def key(self) -> str:
        """Under which it is remembered: a hash, so that no reader of the store learns a name."""
        return hashlib.sha256(f"{self.name}{self.suffix}".encode()).hexdigest()[:40]

    def part(self, suffix: str) -> Request:
        """One of several transactions of the request."""
        return replace(self, suffix=suffix) if suffix else self

    def secret(self, key: bytes) -> bytes:
        """32 bytes that only a holder of both the key and the request's name knows: the same each time it is sent."""
        return hmac.digest(key, f"secret {self.name}".encode(), "sha256")


_request: ContextVar[Request | None] = ContextVar("request", default=None)


@contextmanager
def requested(name: str, body: bytes) -> Iterator[None]:
    """Around the call of a store's method: it is done for this request; for none if it has no name."""
    previous = _request.set(Request(name, hashlib.sha256(body).digest()[:16]) if name else _request.get())
    try:
        yield
    finally:
        _request.reset(previous)


def current_request() -> Request | None:
    """The request of `requested`; None outside of it."""
    return _request.get()


def check_same(request: Request, digest: bytes) -> None:
    """ConflictError where the request was something else when it came first."""
    if digest != request.digest:
        raise ConflictError("idempotency-key: this key was used for another request; take a new one for each")
