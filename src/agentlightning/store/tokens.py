"""Tokens: secrets that open part of a store's methods, each with a role, many of them for one run only.

A token's secret is ``sk-agl-token-…``, made here and shown once; a store keeps its SHA-256, which leads nobody back: the
secret has 256 random bits. Its length differs from that of an attempt's key, and its beginning from that of a server's key.
Several are valid at a time, so that one is replaced while the other still works. Pure functions; what a role may do is the
gateway's to know.
"""

from __future__ import annotations

import base64
import hashlib
import math
import secrets
from dataclasses import dataclass
from typing import Literal, get_args

from agentlightning.errors import InputError

PREFIX = "sk-agl-token-"
ID_PREFIX = "tok-"
MAX_NAME_CHARS = 100
MAX_LIFETIME_S = 100 * 365 * 86_400.0

TokenRole = Literal["admin", "trainer", "worker", "reader", "client"]
"""admin: everything. trainer: its run, or the first one that it creates. worker: what runs agents of its run. reader: reads
its run, or all. client: asks the served model of its run, and nothing of the store."""
RUN_ROLES = {"worker": "its token opens one run", "client": "its token opens one served run"}
"""Roles whose tokens are always of one run, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token, without its secret."""

    id: str
    name: str
    role: TokenRole
    run_id: str | None = None
    """The run that it opens; None for all, and for a trainer that has not created its run yet."""
    created_ns: int = 0
    expires_ns: int | None = None
    revoked_ns: int | None = None

    def ended(self, now_ns: int) -> str | None:
        """ "expired" or "revoked" where it opens nothing any more."""
        if self.revoked_ns is not None:
            return "revoked"
        return "expired" if self.expires_ns is not None and self.expires_ns <= now_ns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A token that was just made, with its secret, which nobody can ask for later."""

    token: Token
    secret: str


def new_secret(random: bytes | None = None) -> str:
    """A secret that nobody guesses, made of 32 random bytes."""
    return PREFIX + base64.urlsafe_b64encode(random or secrets.token_bytes(32)).rstrip(b"=").decode()


def new_token_id() -> str:
    """An id for a token, which is not secret."""
    return ID_PREFIX + secrets.token_hex(8)


def is_token(key: str) -> bool:
    """True for what has the form of a token's secret; an attempt's key, whose text is random, has another length.

    >>> is_token(new_secret()), is_token("sk-agl-server-x"), is_token("sk-agl-token-short")
    (True, False, False)
    """
    return key.startswith(PREFIX) and len(key) == len(PREFIX) + 43


def hash_of(secret: str) -> str:
    """The SHA-256 of a secret: all that stores keep of it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def check_token(name: str, role: str, run_id: str | None, lifetime_s: float | None) -> None:
    """InputError where no token is made of these."""
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InputError(f"name: expected 1 to {MAX_NAME_CHARS} printable characters, got {name[:MAX_NAME_CHARS]!r}")
    if role not in get_args(TokenRole):
        raise InputError(f"role: expected one of {', '.join(get_args(TokenRole))}, got {role!r:.80}")
    if role in RUN_ROLES and run_id is None:
        raise InputError(f"run_id: is required for role {role}: {RUN_ROLES[role]}")
    if role == "admin" and run_id is not None:
        raise InputError("run_id: expected none for role admin, which opens all runs")
    if lifetime_s is not None and not (math.isfinite(lifetime_s) and 0 < lifetime_s <= MAX_LIFETIME_S):
        raise InputError(f"lifetime_s: expected seconds, more than 0 and at most a hundred years, got {lifetime_s}")
