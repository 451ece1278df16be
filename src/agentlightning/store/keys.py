"""Keys of attempts: ``sk-agl-…``, minted by `claim`, verified by gateways, worth exactly one attempt each.

A key carries its identity (the rollout's UUID and the number of the attempt) and a signature under the store's secret, so
that a gateway verifies it without asking anybody. Pure functions; knows neither the store nor HTTP.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import uuid

PREFIX = "sk-agl-"

_IDENTITY_BYTES = 18  # 16 of the UUID, 2 of the attempt
_SIGNATURE_BYTES = 16
_TEXT_LENGTH = (_IDENTITY_BYTES + _SIGNATURE_BYTES) * 8 // 6 + 1


def mint(secret: bytes, rollout_id: str, attempt: int) -> str:
    """The key of one attempt; always the same for the same secret."""
    identity = uuid.UUID(rollout_id).bytes + attempt.to_bytes(2, "big")
    signed = identity + _signature(secret, identity)
    return PREFIX + base64.urlsafe_b64encode(signed).rstrip(b"=").decode()


def session_token(secret: bytes, rollout_id: str) -> str:
    """The token of a session's lease: every gateway knows it, so that each may end a session that another opened."""
    return hmac.digest(secret, b"session " + uuid.UUID(rollout_id).bytes, hashlib.sha256)[:12].hex()


def verify(secret: bytes, key: str) -> tuple[str, int] | None:
    """(rollout id, attempt) of a key signed with this secret, else None. Compares in constant time."""
    text = key.removeprefix(PREFIX)
    if text == key or len(text) != _TEXT_LENGTH or not text.isascii():
        return None
    try:
        signed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    if base64.urlsafe_b64encode(signed).rstrip(b"=") != text.encode():
        return None  # bits of the last character that no byte has: a key has one text
    identity, signature = signed[:_IDENTITY_BYTES], signed[_IDENTITY_BYTES:]
    if not hmac.compare_digest(signature, _signature(secret, identity)):
        return None
    return str(uuid.UUID(bytes=identity[:16])), int.from_bytes(identity[16:], "big")


def _signature(secret: bytes, identity: bytes) -> bytes:
    return hmac.digest(secret, identity, hashlib.sha256)[:_SIGNATURE_BYTES]
