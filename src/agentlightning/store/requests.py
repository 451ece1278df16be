"""The request for which a method of a store is called: its name and what it asks, so that it happens once.

Driven by servers, which get the name from their clients, and read by the stores: a method's
outcome is written in the transaction that did it, as a row (key, digest, outcome). A request that comes again, after a
time-out or a crash, through whatever server, is answered with that outcome. Rows are kept for longer than any client goes on
sending.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from agentlightning.errors import ConflictError

KEPT_S = 900.0
"""Seconds for which what was done for a request is remembered."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a client."""

    name: str
    """The client's, with whatever else tells requests apart: the caller and the method."""
    digest: bytes
    """Of what it asks: the same name for something else is refused."""
    suffix: str = ""

    @property
    def key(self) -> str:
        """Under which it is remembered: a hash, so that whoever reads the store learns no name."""
        return hashlib.sha256(f"{self.name}{self.suffix}".encode()).hexdigest()[:40]

    def part(self, suffix: str) -> Request:
        """One of several transactions of the request."""
        return replace(self, suffix=suffix) if suffix else self

    def secret(self, key: bytes) -> bytes:
        """32 bytes that nobody knows who has not both the key and the request's name: the same each time it is sent."""
        return hmac.digest(key, f"secret {self.name}".encode(), "sha256")


_request: ContextVar[Request | None] = ContextVar("request", default=None)


@contextmanager
def requested(name: str, body: bytes) -> Iterator[None]:
    """Around the call of a store's method: it is done for this request."""
    previous = _request.set(Request(name, hashlib.sha256(body).digest()[:16]))
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
