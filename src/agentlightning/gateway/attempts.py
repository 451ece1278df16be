"""Identification of callers: the attempt behind a path and a key, and its conversations while it runs.

Driven by the proxy for every request, so that both answers are cached: keys for good (a signature does not change), attempts
until this server sees them end, and for a few seconds where another server may end them. Knows nothing of messages.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from agentlightning.engines.base import DEFAULT_POLICY
from agentlightning.gateway.replay import AttemptReplay
from agentlightning.protocols.base import ApiError
from agentlightning.records import Call, Claim, Rollout
from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.coalescer import Coalescer
from agentlightning.store.forks import calls_to_replay, replayable, replayable_external
from agentlightning.store.server_keys import is_loopback
from agentlightning.store.tokens import KEY_PREFIX, verify_key

ATTEMPT_AGE_S = 60.0
"""An attempt's state is read again after this long, in case that it ended unknown to this server."""
SHARED_ATTEMPT_AGE_S = 5.0
"""The same where other servers, which tell this one nothing, share the store."""

caller: ContextVar[tuple[str, int] | None] = ContextVar("caller", default=None)
"""(rollout id, attempt) that the present request is for: what is logged about it carries them."""


MAX_ATTEMPTS = 16_384
"""Attempts, and keys, that are remembered: as many as a server has connections."""
MAX_READ_STATES = 256
"""States of rollouts that one query reads."""
LATE_S = 1.0
"""Seconds that others wait for such a query before they are read beside it."""
MAX_CACHE_BYTES = 256 * 1024 * 1024
"""Bytes that conversations may keep, roughly; the ones that were not used for longest go, and are read again when needed."""


@dataclass(slots=True, eq=False)
class TrackedAttempt:
    """A running attempt, as the gateway knows it."""

    rollout: Rollout
    number: int
    checked_s: float
    conversations: dict[str, Conversation] = field(default_factory=dict)
    """The graph of its calls, by the policy that answers, built when the first one comes: no policy continues the ids of
    another. Calls of external models are in the first; its name is '' as long as no policy was called."""
    complete: bool = False
    """Claimed through this gateway, which has told or been told of every call since: the store knows no more."""
    read_s: float = float("-inf")
    """Start of the last read of its calls, by the monotonic clock."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held, and before it waited for, by work that is done one at a time for all attempts: so they take turns."""
    size: int = 0
    """Bytes of the conversations, as counted last."""
    refused: int = 0
    """Calls that this gateway refused."""
    unrecorded_refusals: int = 0
    """Those of them that are still to be recorded."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Rendered prompt templates, by name."""
    replaced_prompts: set[bytes] = field(default_factory=set)
    """Hashes of the agent's own system prompts that the record has already."""
    ends_refused: bool = False
    """No call was answered since a refusal was recorded last."""
    replay: AttemptReplay | None = None
    """Of a forked rollout: the calls that are still answered from the record; None until the first of them comes."""

    def knows(self, call_id: str) -> bool:
        """True where a call of that id is in one of its graphs."""
        return any(call_id in conversation for conversation in self.conversations.values())


class AttemptCache:
    """Identities and running attempts, at most `limit` of each, with conversations of at most `max_bytes`.

    `shared`: other gateways record calls in the same store without telling this one. `keyless`: the server has no key, and
    callers of this machine need none either.
    """

    def __init__(
        self,
        store: LightningStore,
        *,
        shared: bool = False,
        keyless: bool = False,
        limit: int = MAX_ATTEMPTS,
        max_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        self._store = store
        self._keyless = keyless
        self._shared = shared
        self._age_s = SHARED_ATTEMPT_AGE_S if shared else ATTEMPT_AGE_S
        self._limit = limit
        self._most_bytes = max_bytes
        self._bytes = 0
        self._secret: bytes | None = None
        self._keys: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._attempts: OrderedDict[tuple[str, int], TrackedAttempt] = OrderedDict()
        self._numbers: dict[str, set[int]] = {}
        """Of `_attempts`, by rollout: those of one are found without a look at ten thousand others."""
        self._rewarding: OrderedDict[str, bool] = OrderedDict()
        self._states: Coalescer[str, Rollout | None] = Coalescer(
            self._read_states, max_items=MAX_READ_STATES, late_s=LATE_S
        )
        self._reads: dict[str, object] = {}
        """Reads of states under way, by rollout; what ended meanwhile is taken out."""

    async def identify(self, named: tuple[str, int] | None, key: str | None, client: str | None) -> tuple[str, int]:
        """(rollout id, attempt) of a request from its path and key. Raises ApiError.

        Keys that are not ours are as good as none: many SDKs insist on sending one.
        """
        if key is None or not key.startswith(KEY_PREFIX):
            if named is None:
                raise ApiError(
                    "no key: expected the attempt's own key (sk-agl-…) as Authorization: Bearer",
                    status=401,
                    type="authentication_error",
                    code="invalid_api_key",
                )
            if not self._keyless:  # a proxy on this machine makes everybody a caller from this machine
                raise ApiError(
                    "no key: expected the attempt's own key (sk-agl-…) as Authorization: Bearer; its path alone opens only "
                    "a server without a key",
                    status=401,
                    type="authentication_error",
                    code="invalid_api_key",
                )
            if client is not None and not is_loopback(client):
                raise ApiError(
                    "no key: a path without the attempt's own key (sk-agl-…) is accepted from this machine only",
                    status=401,
                    type="authentication_error",
                    code="invalid_api_key",
                )
            caller.set(named)
            return named
        owner = self._keys.get(key)
        if owner is None:
            owner = await self._verify(key)
        caller.set(owner)
        if named is not None and named != owner:
            raise ApiError(
                "the key belongs to another attempt than the path names",
                status=403,
                type="permission_error",
                code="key_mismatch",
            )
        return owner

    async def running(self, identity: tuple[str, int]) -> TrackedAttempt:
        """The attempt; ApiError where it is unknown or does not run any more."""
        known = self._attempts.get(identity)
        now = time.monotonic()
        if known is not None and now - known.checked_s < self._age_s:
            self._attempts.move_to_end(identity)
            return known
        rollout_id, number = identity
        read = self._reads[rollout_id] = object()
        try:
            rollout = await self._states.submit(rollout_id)
        finally:
            current = self._reads.get(rollout_id) is read
            if current:
                del self._reads[rollout_id]
        if rollout is None or not 1 <= number <= rollout.attempt:
            raise ApiError(f"no attempt {number} of a rollout {rollout_id}", status=404, code="unknown_attempt")
        if rollout.state != "running" or rollout.attempt != number:
            self._drop(identity)
            raise ApiError(
                f"attempt {number} of rollout {rollout_id} is over ({rollout.state}, latest attempt {rollout.attempt}): "
                "its calls are not recorded any more",
                status=410,
                code="attempt_over",
            )
        known = self._attempts.get(identity) or self._add(TrackedAttempt(rollout, number, float("-inf")))
        self._attempts.move_to_end(identity)
        known.rollout = rollout
        if current:  # else it may have ended after the store was read: this call is in time, the next one reads again
            known.checked_s = now
        self._bound_attempts()
        return known

    def expect(self, claims: Sequence[Claim]) -> None:
        """These attempts begin now: their first calls need not ask the store who they are."""
        now = time.monotonic()
        for claim in claims:
            identity = (claim.rollout.id, claim.lease.attempt)
            self._drop((claim.rollout.id, claim.lease.attempt - 1))  # lost with a worker that starts again, say
            self._add(TrackedAttempt(claim.rollout, claim.lease.attempt, now, complete=not self._shared))
            self._keys[claim.key] = identity
        self._bound_attempts()
        _bound(self._keys, self._limit)

    def adopt(self, rollout: Rollout, number: int) -> TrackedAttempt:
        """The running attempt of a session, as the store has just told it; what is known of its calls stays known."""
        identity = rollout.id, number
        caller.set(identity)
        known = self._attempts.get(identity) or self._add(TrackedAttempt(rollout, number, time.monotonic()))
        self._attempts.move_to_end(identity)
        known.rollout, known.checked_s = rollout, time.monotonic()
        self._bound_attempts()
        return known

    async def may_reward(self, attempt: TrackedAttempt) -> bool:
        """True where the run lets its agents set rewards: it has no reward function, which is fixed for good."""
        run_id = attempt.rollout.run_id
        if run_id not in self._rewarding:
            found = await self._store.runs([run_id])
            agent = found[0].config.get("agent") if found else None
            self._rewarding[run_id] = isinstance(agent, dict) and agent.get("reward") == []
            _bound(self._rewarding, self._limit)
        return self._rewarding[run_id]

    async def conversation(
        self, attempt: TrackedAttempt, renderer: Renderer | None, policy: str = DEFAULT_POLICY
    ) -> Conversation:
        """The graph of the attempt's calls to `policy`, rebuilt from the store where this gateway does not have it.

        Without a renderer (external models) any graph will do.
        """
        known = _known(attempt, renderer, policy)
        if known is None:
            async with attempt.reading:
                known = _known(attempt, renderer, policy)
                if known is None:
                    known = await self._build(attempt, renderer, policy)
        self._account(attempt)
        return known

    async def replay(self, attempt: TrackedAttempt) -> AttemptReplay | None:
        """Return what is still answered from the record; None where the rollout continues no other."""
        fork = attempt.rollout.fork
        if fork is None:
            return None
        async with attempt.reading:
            if attempt.replay is None:
                calls = await self._store.calls([fork.rollout_id], fork.attempt)
                # Whoever may enqueue rollouts in one run may not read another's answers by them.
                recorded = [call for call in calls if call.run_id == attempt.rollout.run_id]
                choices = replayable(recorded)
                attempt.replay = AttemptReplay(
                    choices[: calls_to_replay(fork)],
                    fork.answer,
                    replayable_external(recorded, choices[fork.calls : fork.calls + 1]),
                )
            if not attempt.complete and not attempt.replay.ended:
                attempt.replay.see(await self._store.calls([attempt.rollout.id], attempt.number))
            return attempt.replay

    async def refresh(self, attempt: TrackedAttempt) -> None:
        """Read what other gateways recorded; does nothing where this one knows everything. After `conversation`."""
        asked_s = time.monotonic()
        async with attempt.reading:
            # A reading that began after the question answers it: a crowd of requests costs one.
            if attempt.complete or not attempt.conversations or attempt.read_s > asked_s:
                return
            attempt.read_s = time.monotonic()
            calls = await self._store.calls([attempt.rollout.id], attempt.number)
            for policy, conversation in attempt.conversations.items():
                conversation.add(_calls_of(policy, calls))

    def learn(self, calls: Sequence[Call]) -> None:
        """Another gateway recorded these through this server."""
        for call in calls:
            attempt = self._attempts.get((call.rollout_id, call.attempt))
            if attempt is None:
                continue
            known = False
            for policy, conversation in attempt.conversations.items():
                if theirs := _calls_of(policy, [call]):
                    conversation.add(theirs)
                    known = True
            attempt.complete = attempt.complete and known

    def forget(self, rollout_ids: set[str]) -> None:
        """These rollouts' attempts have ended, as far as can be told; one that has not is rebuilt from the store."""
        for rollout_id in rollout_ids:
            self._reads.pop(rollout_id, None)
            for number in list(self._numbers.get(rollout_id, ())):
                self._drop((rollout_id, number))

    def forget_all(self) -> None:
        """Any attempt may have ended: their states are read again before their next calls."""
        self._reads.clear()
        for attempt in self._attempts.values():
            attempt.checked_s = float("-inf")

    async def _read_states(self, rollout_ids: list[str]) -> list[Rollout | None]:
        """These rollouts as they are now: a thousand attempts, each of which is asked for every few seconds, are read with
        a few queries."""
        found = await self._store.rollouts(RolloutQuery(ids=sorted(set(rollout_ids))))
        by_id = {rollout.id: rollout for rollout in found}
        return [by_id.get(rollout_id) for rollout_id in rollout_ids]

    async def _verify(self, key: str) -> tuple[str, int]:
        if self._secret is None:
            self._secret = await self._store.signing_secret()
        owner = verify_key(self._secret, key)
        if owner is None:
            raise ApiError(
                "the key was not made by this server's store",
                status=401,
                type="authentication_error",
                code="invalid_api_key",
            )
        self._keys[key] = owner
        _bound(self._keys, self._limit)
        return owner

    async def _build(self, attempt: TrackedAttempt, renderer: Renderer | None, policy: str) -> Conversation:
        if policy in attempt.conversations or "" in attempt.conversations:
            attempt.complete = False  # calls in flight will record in the graph that they began with
        attempt.read_s = time.monotonic()
        calls = [] if attempt.complete else await self._store.calls([attempt.rollout.id], attempt.number)
        name = "" if renderer is None else policy
        conversation = attempt.conversations[name] = Conversation(renderer, _calls_of(name, calls))
        if name:
            attempt.conversations.pop("", None)
        return conversation

    def _account(self, attempt: TrackedAttempt) -> None:
        """Count what the conversations keep by now, and drop the oldest where all keep too much.

        That may be the attempt's own, which the call at hand holds meanwhile: no one attempt keeps more than the bound.
        """
        if self._attempts.get((attempt.rollout.id, attempt.number)) is not attempt:
            return  # ended meanwhile
        size = sum(conversation.size for conversation in attempt.conversations.values())
        self._bytes += size - attempt.size
        attempt.size = size
        if self._bytes <= self._most_bytes:
            return
        for other in self._attempts.values():  # least recently used first
            if other.conversations:
                self._bytes -= other.size
                other.conversations, other.complete, other.size = {}, False, 0
                if self._bytes <= self._most_bytes:
                    return

    def _bound_attempts(self) -> None:
        while len(self._attempts) > self._limit:
            self._drop(next(iter(self._attempts)))

    def _add(self, attempt: TrackedAttempt) -> TrackedAttempt:
        rollout_id, number = attempt.rollout.id, attempt.number
        self._drop((rollout_id, number))
        self._attempts[rollout_id, number] = attempt
        self._numbers.setdefault(rollout_id, set()).add(number)
        return attempt

    def _drop(self, identity: tuple[str, int]) -> None:
        attempt = self._attempts.pop(identity, None)
        if attempt is None:
            return
        self._bytes -= attempt.size
        numbers = self._numbers[identity[0]]
        numbers.discard(identity[1])
        if not numbers:
            del self._numbers[identity[0]]


def _known(attempt: TrackedAttempt, renderer: Renderer | None, policy: str) -> Conversation | None:
    """The graph to use, if there is one."""
    if renderer is None:
        return next(iter(attempt.conversations.values()), None)
    if "" in attempt.conversations and attempt.complete:  # so far only external models answered
        attempt.conversations = {policy: attempt.conversations[""]}
        attempt.conversations[policy].renderer = renderer
    known = attempt.conversations.get(policy)
    return known if known is not None and known.renderer is renderer else None


def _calls_of(policy: str, calls: Sequence[Call]) -> list[Call]:
    """The calls of the graph of `policy`: its own and those of external models, as far as the record has their tokens."""
    return [call for call in calls if call.policy in ("", policy) and call.history_hash]


def _bound(cache: OrderedDict[Any, Any], limit: int) -> None:
    while len(cache) > limit:
        cache.popitem(last=False)
