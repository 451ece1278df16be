"""Tokens, secrets that open part of a store's methods, each with a role; and keys of attempts, worth one attempt each.

A token's secret is ``sk-agl-token-…``, made here and shown once; a store keeps its SHA-256, which leads nobody back: the
secret has 256 random bits. Several are valid at a time, so that one is replaced while the other still works.

An attempt's key, ``sk-agl-…``, minted by `claim`, carries its identity (the rollout's UUID and the number of the attempt)
and a signature under the store's secret, so that a gateway verifies it without asking anybody. A second key, which the agent
never gets, is for its worker's judge. Pure functions; what a role may do is the gateway's to know.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
import secrets
import uuid
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

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
    """True for what has the form of a token's secret; an attempt's key, whose text is random, has another length."""
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


# --- keys of attempts -------------------------------------------------------------------------------------------------

KEY_PREFIX = "sk-agl-"

_IDENTITY_BYTES = 18  # 16 of the UUID, 2 of the attempt
_SIGNATURE_BYTES = 16
_TEXT_LENGTH = (_IDENTITY_BYTES + _SIGNATURE_BYTES) * 8 // 6 + 1


class KeyOwner(NamedTuple):
    """The owner of an attempt's key."""

    rollout_id: str
    attempt: int
    judge: bool = False
    """The worker's judge of the attempt, not its agent."""


def mint_key(secret: bytes, rollout_id: str, attempt: int, judge: bool = False) -> str:
    """The key of one attempt, or of its judge; always the same for the same secret."""
    identity = uuid.UUID(rollout_id).bytes + attempt.to_bytes(2, "big")
    signed = identity + _signature(secret, identity, judge)
    return KEY_PREFIX + base64.urlsafe_b64encode(signed).rstrip(b"=").decode()


def session_token(secret: bytes, rollout_id: str) -> str:
    """The token of a session's lease: every gateway knows it, so that each may end a session that another opened."""
    return hmac.digest(secret, b"session " + uuid.UUID(rollout_id).bytes, hashlib.sha256)[:12].hex()


def verify_key(secret: bytes, key: str) -> KeyOwner | None:
    """The owner of a key signed with this secret, else None. Compares in constant time."""
    text = key.removeprefix(KEY_PREFIX)
    if text == key or len(text) != _TEXT_LENGTH or not text.isascii():
        return None
    try:
        signed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    if base64.urlsafe_b64encode(signed).rstrip(b"=") != text.encode():
        return None  # bits of the last character that no byte has: a key has one text
    identity, signature = signed[:_IDENTITY_BYTES], signed[_IDENTITY_BYTES:]
    for judge in (False, True):
        if hmac.compare_digest(signature, _signature(secret, identity, judge)):
            return KeyOwner(str(uuid.UUID(bytes=identity[:16])), int.from_bytes(identity[16:], "big"), judge)
    return None


def _signature(secret: bytes, identity: bytes, judge: bool) -> bytes:
    return hmac.digest(secret, identity + b"judge" * judge, hashlib.sha256)[:_SIGNATURE_BYTES]
