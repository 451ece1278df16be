"""Running attempts: whose a request is, the conversations of an attempt, what a fork replays, refusals, and expired leases.

Driven by the proxy for every request, so that attempts are cached until this server sees them end, or for a few seconds
where another server may end them. Knows nothing of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from cachetools import LRUCache
from uuid_utils import uuid7

from agentlightning.engines.base import DEFAULT_POLICY
from agentlightning.errors import StoreError
from agentlightning.protocols.base import ApiError
from agentlightning.records import ABANDONED, JSON, Call, Claim, Rollout, Sampling, Span
from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.renderer import Renderer
from agentlightning.runtime.clock import elapsed_s
from agentlightning.store.base import LEASE_S, LightningStore, RolloutQuery
from agentlightning.store.coalescer import Coalescer
from agentlightning.store.forks import Choices, replayable, replayable_external
from agentlightning.store.gateway_events import FAILED_CALLS, MAX_REASON_CHARS, OUTGROWN, REFUSED_CALLS
from agentlightning.store.server_keys import is_loopback
from agentlightning.store.tokens import KEY_PREFIX, KeyOwner, verify_key

log = logging.getLogger(__name__)

ATTEMPT_AGE_S = 60.0
"""An attempt's state is read again after this long, in case it ended unknown to this server."""
SHARED_ATTEMPT_AGE_S = 5.0
"""The same where other servers share the store."""
MAX_ATTEMPTS = 16_384
"""Cached attempts: as many as a server has connections."""
MAX_ENDS = 64
"""Of an attempt: sub-agents end one by one, and a program may ask again a few times."""
MAX_READ_STATES = 256
"""States of rollouts per query."""
MAX_CACHE_BYTES = 256 * 1024 * 1024
"""Approximate bytes of all conversations; the least recently used attempts are dropped, and read again when needed."""

caller: ContextVar[tuple[str, int] | None] = ContextVar("caller", default=None)
"""(rollout id, attempt) of the present request, for the log."""


@dataclass(slots=True, eq=False)
class TrackedAttempt:
    """A running attempt."""

    rollout: Rollout
    number: int
    checked_s: float
    """Monotonic time of the last check that it runs."""
    key: str = ""
    """The key of its last request, which was verified if it is one of ours."""
    conversations: dict[str, Conversation] = field(default_factory=dict)
    """The graph of its calls by policy, built at the first call: no policy continues the ids of another. Calls of external
    models are in the first; its name is '' as long as no policy was called."""
    complete: bool = False
    """Claimed through this gateway, which has seen every call since: the store knows no more."""
    read_s: float = float("-inf")
    """Monotonic start of the last read of its calls."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Acquired before a lock that all attempts share, so that they take turns."""
    size: int = 0
    """Bytes of the conversations, as counted last."""
    posted: int = 0
    """Rewards that its agent posted here."""
    refused: int = 0
    unrecorded_refusals: int = 0
    prompts: dict[str, str] = field(default_factory=dict)
    """Rendered prompt templates, by name."""
    replaced_prompts: set[bytes] = field(default_factory=set)
    """Hashes of the agent's own system prompts that the record has already."""
    ends: int = 0
    """Calls beyond a limit that were told to end."""
    ended_by: ApiError | None = None
    """The reason sent with the last of them: a message that no record has, and that a request may continue by its id."""
    ends_refused: bool = False
    """No call was answered since a refusal was recorded last."""
    ends_failed: bool = False
    """The same of a failure for want of a model."""
    replay: AttemptReplay | None = None
    """Of a forked rollout, from its first call on."""

    events: Counter[str] = field(default_factory=Counter)
    """Events of each kind that may leave a span."""

    def leaves_span(self, event: str) -> bool:
        """True where one more event of this kind leaves a span: the first ones do, then every doubling of their number,
        whatever a looping agent sends."""
        self.events[event] += 1
        count = self.events[event]
        return count <= MAX_SINGLE or not count & (count - 1)

    def knows(self, call_id: str) -> bool:
        """True where a call of that id is in one of its graphs."""
        return any(call_id in conversation for conversation in self.conversations.values())


class AttemptReplay:
    """The recorded calls that a forked attempt's first calls are answered from.

    A call gets a recorded completion where its request is the recorded one: same messages, tools, decoding, prompt tokens,
    and stops and a bound of tokens under which the completion is the same. The first call of the policy that is none of
    those left ends the replay for good, since the agent's state is then one that the recorded attempt never was in. Calls
    of external models before the place of the fork are replayed as well while it goes on; one that is not recorded ends
    nothing. What was replayed follows from the attempt's own record, so that any gateway can go on with it.
    """

    def __init__(self, recorded: Sequence[Choices], external: Sequence[Call] = ()) -> None:
        """`recorded` and `external` are the calls to replay, in the order in which they began."""
        self._recorded = recorded
        self._external = external
        self._taken: set[str] = set()
        self.ended = False

    def see(self, own: Iterable[Call]) -> None:
        """Take in what the attempt has recorded, through whatever gateway."""
        for call in own:
            if call.policy and call.replayed_id is None:
                self.ended = True
            elif call.replayed_id is not None and call.finish_reason != ABANDONED:
                self._taken.add(call.replayed_id)

    def take(
        self, request_hash: str, decoding: str, prompt_tokens: int, samples: int, fits: Callable[[Call], bool]
    ) -> Choices:
        """The recorded choices of this request, which no other gets from now on; empty where it is to be sampled. `fits`
        decides what no hash covers."""
        for choices in self._left:
            call = choices[0]
            same = call.request_hash == request_hash and call.decoding.get("request", "") == decoding
            if same and call.prompt_tokens == prompt_tokens and len(choices) == samples and all(map(fits, choices)):
                self._taken.add(call.id)
                return choices
        self.end("a request is none of them")
        return []

    def end(self, why: str) -> None:
        """Replay no more."""
        if left := len(self._left):
            log.warning("the replay ends with %d calls left: %s", left, why)
        self.ended = True

    def take_external(self, request_hash: str, model: str, protocol: str, sampling: Sampling) -> Call | None:
        """The recorded call of this request to an external model; None where there is none left."""
        wanted = (request_hash, model, protocol, sampling)
        for call in () if self.ended else self._external:
            if call.id not in self._taken and (call.request_hash, call.model, call.protocol, call.sampling) == wanted:
                self._taken.add(call.id)
                return call
        return None

    def give_back(self, call: Call) -> None:
        """The call failed before it was recorded: its next try gets `call` again."""
        self._taken.discard(call.id)

    @property
    def _left(self) -> list[Choices]:
        return [] if self.ended else [choices for choices in self._recorded if choices[0].id not in self._taken]


class _Attempts(LRUCache[str, TrackedAttempt]):
    """Running attempts by rollout, with the bytes of their conversations."""

    bytes = 0

    def __delitem__(self, rollout_id: str) -> None:
        self.bytes -= self[rollout_id].size
        super().__delitem__(rollout_id)


class AttemptCache:
    """Running attempts, at most `limit`, with conversations of at most `max_bytes`.

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
        self._max_bytes = max_bytes
        self._secret: bytes | None = None
        self._attempts = _Attempts(limit)
        self._settings: LRUCache[str, JSON] = LRUCache(limit)
        self._states: Coalescer[str, Rollout | None] = Coalescer(self._read_states, max_items=MAX_READ_STATES)
        self._reads: dict[str, object] = {}
        """Reads of states under way, by rollout; one that ended meanwhile is removed."""

    async def identify(self, named: tuple[str, int] | None, key: str | None, client: str | None) -> KeyOwner:
        """The sender of a request, by its path and key. Raises ApiError.

        Keys that are not ours count as none: many SDKs insist on sending one.
        """
        if key is None or not key.startswith(KEY_PREFIX):
            if named is None:
                raise _unauthorized("no key: expected the attempt's own key (sk-agl-…) as Authorization: Bearer")
            if not self._keyless:  # a proxy on this machine makes everybody a caller from this machine
                raise _unauthorized(
                    "no key: expected the attempt's own key (sk-agl-…) as Authorization: Bearer; its path alone opens only "
                    "a server without a key"
                )
            if client is not None and not is_loopback(client):
                raise _unauthorized(
                    "no key: a path without the attempt's own key (sk-agl-…) is accepted from this machine only"
                )
            caller.set(named)
            return KeyOwner(*named)
        known = None if named is None else self._attempts.get(named[0])
        if known is not None and named == (known.rollout.id, known.number) and _equal(known.key, key):
            owner: KeyOwner | None = KeyOwner(*named)
        else:
            if self._secret is None:
                self._secret = await self._store.signing_secret()
            owner = verify_key(self._secret, key)
        if owner is None:
            raise _unauthorized("the key was not made by this server's store")
        caller.set(owner[:2])
        if named is not None and named != owner[:2]:
            raise ApiError(
                "the key belongs to another attempt than the path names",
                status=403,
                type="permission_error",
                code="key_mismatch",
            )
        return owner

    async def running(self, identity: tuple[str, int]) -> TrackedAttempt:
        """The attempt. Raises ApiError where it is unknown or no longer runs."""
        rollout_id, number = identity
        known = self._attempts.get(rollout_id)
        now = time.monotonic()
        if known is not None and known.number == number and now - known.checked_s < self._age_s:
            return known
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
            if (known := self._attempts.get(rollout_id)) is not None and known.number == number:
                del self._attempts[rollout_id]
            raise ApiError(
                f"attempt {number} of rollout {rollout_id} is over ({rollout.state}, latest attempt {rollout.attempt}): "
                "its calls are not recorded any more",
                status=410,
                code="attempt_over",
            )
        # Where it may have ended after the store was read, this call is in time, and the next one reads again.
        return self._track(rollout, number, now if current else None)

    def expect(self, claims: Sequence[Claim]) -> None:
        """These attempts begin now: their first calls need not ask the store who they are."""
        now = time.monotonic()
        for claim in claims:
            rollout, number = claim.rollout, claim.lease.attempt
            self._attempts.pop(rollout.id, None)
            self._attempts[rollout.id] = TrackedAttempt(rollout, number, now, complete=not self._shared)

    def adopt(self, rollout: Rollout, number: int) -> TrackedAttempt:
        """The running attempt of a session that was read just now; what is known of its calls stays known."""
        caller.set((rollout.id, number))
        return self._track(rollout, number, time.monotonic())

    async def reward_refusal(self, attempt: TrackedAttempt, name: str) -> str | None:
        """The reason why the run does not let its agents post a reward of this name; None where it does."""
        return _reward_refusal(await self._settings_of(attempt.rollout.run_id), name)

    async def ends_at_limit(self, attempt: TrackedAttempt) -> bool:
        """True where a call beyond a limit gets an answer that ends the agent (`agent.at_limit`), which one that asks on and
        on gets no more. Users of a served model get errors."""
        agent = (await self._settings_of(attempt.rollout.run_id))["agent"]
        default = "error" if agent.get("command") is None else "end"
        if attempt.rollout.kind == "session" or (agent.get("at_limit") or default) == "error":
            return False
        attempt.ends += 1
        return attempt.ends <= MAX_ENDS

    async def _settings_of(self, run_id: str) -> JSON:
        """The tables of the run's agent and its sandbox, which never change."""
        known = self._settings.get(run_id)
        if known is None:
            found = await self._store.runs([run_id])
            tables = {name: found[0].config.get(name) if found else None for name in ("agent", "sandbox")}
            known = {name: table if isinstance(table, dict) else {} for name, table in tables.items()}
            self._settings[run_id] = known
        return known

    async def conversation(
        self, attempt: TrackedAttempt, renderer: Renderer | None, policy: str = DEFAULT_POLICY
    ) -> Conversation:
        """The graph of the attempt's calls to `policy`, rebuilt from the store where this gateway does not have it.

        Without a renderer (external models) any graph will do.
        """
        known = attempt.conversations.get(policy)
        if known is None or known.renderer is not renderer:
            known = _known(attempt, renderer, policy)
            if known is None:
                async with attempt.reading:
                    known = _known(attempt, renderer, policy) or await self._build(attempt, renderer, policy)
        self._account(attempt)
        return known

    async def replay(self, attempt: TrackedAttempt) -> AttemptReplay | None:
        """The replay of a forked rollout; None where the rollout continues no other."""
        fork = attempt.rollout.fork
        if fork is None:
            return None
        async with attempt.reading:
            if attempt.replay is None:
                calls = await self._store.calls([fork.rollout_id], fork.attempt)
                # Whoever may enqueue rollouts in one run must not read another run's completions through them.
                recorded = [call for call in calls if call.run_id == attempt.rollout.run_id]
                choices = replayable(recorded)
                attempt.replay = AttemptReplay(
                    choices[: fork.calls],
                    replayable_external(recorded, choices[fork.calls : fork.calls + 1]),
                )
            if not attempt.complete and not attempt.replay.ended:
                attempt.replay.see(await self._store.calls([attempt.rollout.id], attempt.number))
            return attempt.replay

    async def refresh(self, attempt: TrackedAttempt) -> None:
        """Read what other gateways recorded; does nothing where this one knows everything. After `conversation`."""
        asked_s = time.monotonic()
        async with attempt.reading:
            # A read that began after the question answers it: a crowd of requests costs one.
            if attempt.complete or not attempt.conversations or attempt.read_s > asked_s:
                return
            attempt.read_s = time.monotonic()
            calls = await self._store.calls([attempt.rollout.id], attempt.number)
            for policy, conversation in attempt.conversations.items():
                conversation.add(_calls_of(policy, calls))

    def learn(self, calls: Sequence[Call]) -> None:
        """Another gateway recorded these through this server."""
        for call in calls:
            attempt = self._attempts.get(call.rollout_id)
            if attempt is None or attempt.number != call.attempt:
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
            self._attempts.pop(rollout_id, None)

    def forget_all(self) -> None:
        """Any attempt may have ended: their states are read again before their next calls."""
        self._reads.clear()
        for rollout_id in list(self._attempts):
            self._attempts[rollout_id].checked_s = float("-inf")

    def _track(self, rollout: Rollout, number: int, checked_s: float | None) -> TrackedAttempt:
        known = self._attempts.get(rollout.id)
        if known is None or known.number != number:
            self._attempts.pop(rollout.id, None)
            known = self._attempts[rollout.id] = TrackedAttempt(rollout, number, float("-inf"))
        known.rollout = rollout
        if checked_s is not None:
            known.checked_s = checked_s
        return known

    async def _read_states(self, rollout_ids: list[str]) -> list[Rollout | None]:
        found = await self._store.rollouts(RolloutQuery(ids=sorted(set(rollout_ids))))
        by_id = {rollout.id: rollout for rollout in found}
        return [by_id.get(rollout_id) for rollout_id in rollout_ids]

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
        """Count the bytes of its conversations, and drop the least recently used attempts where all have too many.

        That may be the attempt itself, which the call at hand still holds: no attempt keeps more than the bound.
        """
        size = 0
        for conversation in attempt.conversations.values():
            size += conversation.size
        if size == attempt.size or self._attempts.get(attempt.rollout.id) is not attempt:
            return
        self._attempts.bytes += size - attempt.size
        attempt.size = size
        while self._attempts.bytes > self._max_bytes:
            self._attempts.popitem()


def _equal(known: str, given: str) -> bool:
    """True where it is the same key, told in a time that says nothing of a known one."""
    return bool(known) and given.isascii() and hmac.compare_digest(known, given)


def _reward_refusal(settings: JSON, name: str) -> str | None:
    agent = settings["agent"]
    if agent.get("reward") != []:
        return "this run takes no rewards from its agents: it has a reward function"
    isolated = settings["sandbox"].get("type", "none") != "none"
    named = agent.get("posted_rewards")
    if (named is None and not isolated) or (isinstance(named, list) and name in named):
        return None
    why = "its agents run in a sandbox, and " * isolated + "agent.posted_rewards does not name it"
    return f"this run takes no posted reward {name[:80]!r}: {why}"


def _unauthorized(sentence: str) -> ApiError:
    return ApiError(sentence, status=401, type="authentication_error", code="invalid_api_key")


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
    """The calls of the graph of `policy`: its own and those of external models, as far as the record has their texts."""
    return [call for call in calls if call.policy in ("", policy) and call.history_hash]


# --- spans of the gateway's own -----------------------------------------------------------------------------------------


def gateway_span(rollout: Rollout, attempt: int, name: str, attributes: JSON, error: str | None = None) -> Span:
    """A span of this moment by which the gateway adds an event to an attempt's record; `error` is its error message."""
    now = time.time_ns()
    return Span(
        id=str(uuid7()),
        run_id=rollout.run_id,
        rollout_id=rollout.id,
        attempt=attempt,
        name=name,
        attributes=attributes,
        started_ns=now,
        finished_ns=now,
        status="unset" if error is None else "error",
        status_message=error or "",
    )


MAX_SINGLE = 16
"""Refusals of an attempt, and other events of a kind, that are recorded one by one; later ones when their number has
doubled."""
MAX_MESSAGE_CHARS = 500
NOT_REFUSALS = frozenset({401, 403, 408, 409, 410, 429, 499})
"""Statuses that say nothing of the request itself, but of its sender, its time or their number."""

_PLACE = re.compile(r"[.\[].*", re.DOTALL)


async def record_refusal(store: LightningStore, attempt: TrackedAttempt, refusal: ApiError) -> None:
    """Records a refused model call before the agent gets the answer; does nothing for failures of ours.

    Bounded, whatever a looping agent sends: after the first refusals only each doubling of their number, and the first one
    after a call that was answered, is written.
    """
    if not 400 <= refusal.status < 500 or refusal.status in NOT_REFUSALS:
        return
    attempt.refused += 1
    attempt.unrecorded_refusals += 1
    doubled = not attempt.refused & (attempt.refused - 1)
    if attempt.refused > MAX_SINGLE and not doubled and attempt.ends_refused:
        return
    attempt.ends_refused = True
    count, attempt.unrecorded_refusals = attempt.unrecorded_refusals, 0
    message = refusal.message[:MAX_MESSAGE_CHARS]
    about = {"fields": refused_fields(refusal), "count": count, "status": refusal.status, "message": message}
    await store.append_spans([gateway_span(attempt.rollout, attempt.number, REFUSED_CALLS, about, message)])


async def record_failure(store: LightningStore, attempt: TrackedAttempt, failure: Exception) -> None:
    """Records that a call failed for want of a model, before the agent gets the answer: it does not give up then."""
    status = getattr(failure, "status", 500)
    if attempt.ends_failed or not (status >= 500 or status == 429):
        return
    attempt.ends_failed = True
    about: JSON = {"status": status, "message": str(failure)[:MAX_MESSAGE_CHARS]}
    with contextlib.suppress(StoreError):  # it is away: the worker sees that, too
        await store.append_spans([gateway_span(attempt.rollout, attempt.number, FAILED_CALLS, about, "failed")])


def refused_fields(refusal: ApiError) -> str:
    """The top-level fields that a refusal names, without places in lists, or the code or status where it names none.

    >>> refused_fields(ApiError("…", fields=("tools[0]", "tools[7]", "top_a")))
    'tools + top_a'
    >>> refused_fields(ApiError("…", param="messages", code="context_length_exceeded"))
    'context_length_exceeded'
    >>> refused_fields(ApiError("…", status=413, code="body_too_large"))
    'body_too_large'
    """
    if refusal.code == OUTGROWN:  # no field is wrong
        return OUTGROWN
    named = refusal.fields or (() if refusal.param is None else (refusal.param,))
    names = dict.fromkeys("".join(filter(str.isprintable, _PLACE.sub("", name))) for name in named)
    shown = " + ".join(name for name in names if name)
    return (shown or refusal.code or f"HTTP {refusal.status}")[:MAX_REASON_CHARS]


# --- leases -------------------------------------------------------------------------------------------------------------

EXPIRY_S = 1.0
"""Seconds between two searches for expired leases."""
MAX_GAP = 1 / 6
"""Share of a lease by which searches may be late: workers beat three times a lease, so less costs nobody two beats."""


class LeaseExpiry:
    """Gives up attempts whose leases have expired, once every worker had the chance to renew them; a background task.

    After a start, and after each gap in which this server, its store or the machine stood still, no lease is given up for
    `lease_s`: nobody could renew meanwhile. `on_expired` is called where some were given up.
    """

    def __init__(
        self,
        store: LightningStore,
        on_expired: Callable[[], None],
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = elapsed_s,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._on_expired = on_expired
        self._lease_s = lease_s
        self._clock = clock
        self._sleep = sleep

    async def run(self) -> None:
        """Search until cancelled."""
        pause_s = min(EXPIRY_S, self._lease_s / 4)
        since = looked = self._clock()
        while True:
            try:
                # Asks the store for next to nothing first: a search that waited for it would then find all expired.
                await self._store.runs(limit=1)
                now = self._clock()
                if now - looked > pause_s + self._lease_s * MAX_GAP:
                    if now - since >= self._lease_s:
                        log.warning("leases could not be renewed for a while: none is given up for %g s", self._lease_s)
                    since = now
                elif now - since >= self._lease_s and await self._store.expire_leases(within_s=self._lease_s * MAX_GAP):
                    self._on_expired()
            except StoreError as cause:
                log.warning("leases were not checked: %s", cause)
                since = now = self._clock()
            looked = now
            await self._sleep(pause_s)
