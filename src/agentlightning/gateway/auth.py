"""Who is calling: the attempt behind a path and a key, and whether it still runs.

Driven by the proxy for every request, so that both answers are cached: keys for good (a signature does not change), attempts
until this server sees them end, and for a few seconds where another server may end them. Knows nothing of messages.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.protocols.neutral import Refusal
from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.renderer import Renderer
from agentlightning.store import keys
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.types import Claim, Rollout

ATTEMPT_AGE_S = 5.0
"""Another server may end an attempt: its state is read again after this long."""

LOOPBACK = ("127.", "::1", "::ffff:127.")


@dataclass(slots=True, eq=False)
class Attempt:
    """A running attempt, as the gateway knows it."""

    rollout: Rollout
    number: int
    checked_s: float
    conversation: Conversation | None = None
    """The graph of its calls, built when the first one comes."""
    new: bool = False
    """Claimed through this server: what it does not know of, no store does."""


class Attempts:
    """Identities and running attempts, at most `limit` of each."""

    def __init__(self, store: LightningStore, limit: int = 4096) -> None:
        self._store = store
        self._limit = limit
        self._secret: bytes | None = None
        self._keys: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._attempts: OrderedDict[tuple[str, int], Attempt] = OrderedDict()

    async def identify(self, named: tuple[str, int] | None, key: str | None, client: str | None) -> tuple[str, int]:
        """(rollout id, attempt) of a request from its path and key. Raises Refusal.

        Keys that are not ours are as good as none: many SDKs insist on sending one.
        """
        if key is None or not key.startswith(keys.PREFIX):
            if named is None:
                raise Refusal(
                    "no key: expected the attempt's own key (sk-agl-…) as Authorization: Bearer",
                    status=401,
                    type="authentication_error",
                    code="invalid_api_key",
                )
            if client is not None and not client.startswith(LOOPBACK):
                raise Refusal(
                    "no key: a path without the attempt's own key (sk-agl-…) is accepted from this machine only",
                    status=401,
                    type="authentication_error",
                    code="invalid_api_key",
                )
            return named
        owner = self._keys.get(key)
        if owner is None:
            owner = await self._verify(key)
        if named is not None and named != owner:
            raise Refusal(
                "the key belongs to another attempt than the path names",
                status=403,
                type="permission_error",
                code="key_mismatch",
            )
        return owner

    async def running(self, identity: tuple[str, int]) -> Attempt:
        """The attempt; Refusal where it is unknown or does not run any more."""
        known = self._attempts.get(identity)
        now = time.monotonic()
        if known is not None and now - known.checked_s < ATTEMPT_AGE_S:
            self._attempts.move_to_end(identity)
            return known
        rollout_id, number = identity
        found = await self._store.rollouts(RolloutQuery(ids=[rollout_id]))
        if not found or not 1 <= number <= found[0].attempt:
            raise Refusal(f"no attempt {number} of a rollout {rollout_id}", status=404, code="unknown_attempt")
        rollout = found[0]
        if rollout.state != "running" or rollout.attempt != number:
            self._attempts.pop(identity, None)
            raise Refusal(
                f"attempt {number} of rollout {rollout_id} is over ({rollout.state}, latest attempt {rollout.attempt}): "
                "its calls are not recorded any more",
                status=410,
                code="attempt_over",
            )
        if known is None:
            known = self._attempts.setdefault(identity, Attempt(rollout, number, now))
        known.rollout, known.checked_s = rollout, now
        _bound(self._attempts, self._limit)
        return known

    def expect(self, claims: Sequence[Claim]) -> None:
        """These attempts begin now: their first calls need not ask the store who they are."""
        now = time.monotonic()
        for claim in claims:
            identity = (claim.rollout.id, claim.lease.attempt)
            self._attempts[identity] = Attempt(claim.rollout, claim.lease.attempt, now, new=True)
            self._keys[claim.key] = identity
        _bound(self._attempts, self._limit)
        _bound(self._keys, self._limit)

    async def conversation(self, attempt: Attempt, renderer: Renderer) -> Conversation:
        """The graph of the attempt's calls, rebuilt from the store where this gateway does not have it."""
        if attempt.conversation is None or attempt.conversation.renderer is not renderer:
            known = attempt.new and attempt.conversation is None
            calls = [] if known else await self._store.calls([attempt.rollout.id], attempt.number)
            if attempt.conversation is None or attempt.conversation.renderer is not renderer:
                attempt.conversation = Conversation(renderer, calls)
        return attempt.conversation

    def forget(self, rollout_ids: set[str]) -> None:
        """These rollouts' attempts have ended, as far as can be told; one that has not is rebuilt from the store."""
        for identity in [one for one in self._attempts if one[0] in rollout_ids]:
            del self._attempts[identity]

    def forget_all(self) -> None:
        """Any attempt may have ended: their states are read again before their next calls."""
        for attempt in self._attempts.values():
            attempt.checked_s = float("-inf")

    async def _verify(self, key: str) -> tuple[str, int]:
        if self._secret is None:
            self._secret = await self._store.signing_secret()
        owner = keys.verify(self._secret, key)
        if owner is None:
            raise Refusal(
                "the key was not made by this server's store",
                status=401,
                type="authentication_error",
                code="invalid_api_key",
            )
        self._keys[key] = owner
        _bound(self._keys, self._limit)
        return owner


def _bound(cache: OrderedDict[Any, Any], limit: int) -> None:
    while len(cache) > limit:
        cache.popitem(last=False)
