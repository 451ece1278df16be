"""The context of a call of a store's method: the request, which happens once, and the token whose first run it makes.

Set by servers around the call (`requested`, `binding`), read by the stores. The outcome of a request is written in the
transaction that produces it, as a row (key, digest, outcome): a request that comes again, after a time-out or a crash,
through whatever server, is answered with it. Rows are kept for longer than any client goes on sending.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from agentlightning.errors import ConflictError

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


# --- tokens without a run -------------------------------------------------------------------------------------------------

_binds: ContextVar[str | None] = ContextVar("binds", default=None)


@contextmanager
def binding(token_id: str | None) -> Iterator[None]:
    """Around the call of a store's method: the first run that it creates becomes that of this token, which has none."""
    previous = _binds.set(token_id)
    try:
        yield
    finally:
        _binds.reset(previous)


def bound_token() -> str | None:
    """The token of `binding`; None outside of it."""
    return _binds.get()
