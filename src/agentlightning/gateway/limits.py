"""Limits: what one agent, one serving key, and all of a run together may use of the gateway and of models.

The proxy enters every request before its body is read; the calls begin each completion that is not a repetition and report
what it used. Bounds of a run are its resource of kind ``limits``; the server's own bound each attempt as well. Totals are
counted as calls are recorded; unknown ones are read from the store, once, or from time to time where other gateways record
calls, too. Without totals among the bounds nothing is read. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from agentlightning.config.run import LIMITS_RESOURCE, LimitConfig, LimitsConfig, parse_settings
from agentlightning.errors import ConfigError
from agentlightning.gateway.asgi_response import AgentRequest
from agentlightning.gateway.attempts import gateway_span
from agentlightning.protocols.base import ApiError
from agentlightning.records import Call, Resource, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.gateway_events import LIMIT_REACHED, OUTGROWN
from agentlightning.store.scan import read_calls, read_rollouts
from agentlightning.store.tokens import Token

K = TypeVar("K")
V = TypeVar("V")

RETRY_AFTER_S = 1
"""Seconds after which a refusal that will pass may be tried again."""
ATTEMPT_AGE_S = 5.0
RUN_AGE_S = 30.0
"""Maximum age of totals where other gateways share the store."""
MAX_ATTEMPTS = 4096
MAX_RUNS = 256
"""Attempts and runs whose use is remembered: the ones used last, and those with a request under way."""
OF_RUN = ""
"""Name of the usage of a whole run, among those of its serving keys."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of every attempt that the operator of the server sets: they protect the server, not a budget."""

    max_parallel_requests: int = 256
    max_request_bytes: int = 256 * 1024 * 1024


class LimitReachedError(ApiError):
    """A request beyond a limit. `passes`: the same request may be served later."""

    def __init__(self, setting: str, sentence: str, *, passes: bool) -> None:
        kind = "insufficient_quota"
        super().__init__(
            f"{sentence} ({setting})",
            status=429,
            type="requests" if passes else kind,
            code="rate_limit_exceeded" if passes else kind,
            retry_after_s=RETRY_AFTER_S if passes else None,
            final=not passes,
        )
        self.setting = setting


@dataclass(slots=True, eq=False, weakref_slot=True)
class Usage:
    """Totals of the recorded calls of an attempt, a serving key or a run, and its requests under way."""

    calls: int = 0
    tokens: int = 0
    requests: int = 0
    """Under way."""
    bytes: int = 0
    """Of the requests under way."""
    begun: int = 0
    """Calls under way, which are not recorded yet."""
    reserved: int = 0
    """Tokens that these may use."""
    waiting: int = 0
    """Calls that wait until some are not reserved any more."""
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, when that is so."""
    read_s: float = float("-inf")
    """Start of the last read of the totals, by the monotonic clock."""
    shared: bool = False
    """Other gateways record calls of it, too: it is read again from time to time."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    reported: set[str] = field(default_factory=set)
    """Limits that have left a span."""

    def add(self, call: Call) -> None:
        """Count a recorded call. Further choices of a call have sampled tokens of their own and nothing else.

        A call that a fork replayed counts as one that the agent made, and used no tokens.
        """
        first = "." not in call.id
        self.calls += first
        if call.replayed_id is not None:
            return
        if call.policy:
            # Of a call whose record was dropped the usage has what was sampled.
            self.tokens += len(call.sampled_ids) or _count(call.usage.get("sampled_tokens"))
            self.tokens += call.prompt_tokens if first else 0
        else:
            self.tokens += _count(call.usage.get("prompt_tokens")) + _count(call.usage.get("sampled_tokens"))

    def wake(self) -> None:
        """Let those who wait for tokens look again."""
        self.freed.set()
        self.freed = asyncio.Event()

    async def wait(self, request: AgentRequest) -> None:
        """Wait until some tokens are not reserved any more. Raises ApiError where the agent goes away."""
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            self.wake()

        watch = request.on_disconnect(leave)
        self.waiting += 1
        try:
            await self.freed.wait()
        finally:
            self.waiting -= 1
            watch.stop()
        if gone:
            raise ApiError("the client went away while its call waited for others", status=499)

    def raise_to(self, calls: int, tokens: int) -> None:
        """Take over totals where they are larger: they only grow, and each reader may know of calls that others do not."""
        self.calls, self.tokens = max(self.calls, calls), max(self.tokens, tokens)


class RunUsage:
    """Reads the usage of a run and of each of its serving keys from the store; of rollouts that have all finished once."""

    def __init__(self) -> None:
        self._finished: dict[str, Usage] = defaultdict(Usage)
        """Of the rollouts up to `_after`, which have all finished."""
        self._after: str | None = None

    async def read(self, store: LightningStore, run_id: str) -> dict[str, tuple[int, int]]:
        """Calls and tokens of each serving key by its token's id, and those of the run as `OF_RUN`. Raises StoreError."""
        found: dict[str, Usage] = defaultdict(Usage)
        in_order = True
        async for portion in read_rollouts(store, RolloutQuery(run_id=run_id, after=self._after)):
            begun = {rollout.id: rollout for rollout in portion if rollout.attempt}
            in_order = in_order and all(rollout.finished_ns is not None for rollout in portion)
            counted = self._finished if in_order else found
            for call in await read_calls(store, list(begun.values())):
                counted[OF_RUN].add(call)
                if (key := _key_of(begun[call.rollout_id])) is not None:
                    counted[key].add(call)
            if in_order:
                self._after = portion[-1].id
        names = {OF_RUN} | found.keys() | self._finished.keys()
        parts = {name: (self._finished[name], found[name]) for name in names}
        return {name: (sum(one.calls for one in both), sum(one.tokens for one in both)) for name, both in parts.items()}


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Run:
    """A run in use."""

    resources: list[Resource] = field(default_factory=list)
    """The ones that the limits come from."""
    limits: LimitsConfig | None = None
    """None: the run has none."""
    usage: Usage = field(default_factory=Usage)
    keys: dict[str, Usage] = field(default_factory=lambda: defaultdict(Usage))
    """By the id of a serving key."""
    recorded: RunUsage = field(default_factory=RunUsage)

    def take(self, resources: list[Resource]) -> None:
        """Take over the limits of these resources. Raises ApiError where they are misconfigured: nothing would be
        limited."""
        found = None
        for one in resources:
            if one.kind == "limits":
                try:
                    found = parse_settings(LimitsConfig, one.value, "limits", ".")
                except ConfigError as cause:
                    raise ApiError(str(cause), status=502, type="server_error", code="limits_misconfigured") from cause
        self.limits, self.resources = found, resources


Bound = tuple[str, LimitConfig, Usage]
"""A limit with the name of its table, and what counts against it."""


class Admission:
    """One request's place within the limits; `leave` must follow."""

    __slots__ = ("_begun", "_bytes", "_reserved", "_run", "_server", "_totals", "_usages", "counts_tokens")

    def __init__(
        self, server: ServerLimits, usages: Sequence[Usage], bounds: Sequence[Bound] = (), run: _Run | None = None
    ) -> None:
        """The first of `usages` is the attempt's, which the server's limits bound."""
        self._server = server
        self._usages = usages
        self._run = run
        """Held, so that a run with a request under way is not forgotten."""
        self._bytes = 0
        self._begun = False
        self._reserved: list[int] = []
        """Tokens of each of its calls under way, of which the last begun ends first."""
        self._totals: list[Bound] = []
        """The bounds with totals."""
        self.counts_tokens = False
        """True where the call counts by its tokens."""
        for bound in bounds:
            limit = bound[1]
            if limit.max_tokens is not None or limit.max_calls is not None:
                self._totals.append(bound)
                self.counts_tokens = self.counts_tokens or limit.max_tokens is not None
        usages[0].requests += 1

    @property
    def has_totals(self) -> bool:
        """True where the call counts."""
        return bool(self._totals)

    def take(self, size: int) -> None:
        """Count so many bytes of the request. Raises ApiError where there are too many under way."""
        attempt = self._usages[0]
        if attempt.bytes + size > self._server.max_request_bytes:
            raise _too_many_bytes(self._server.max_request_bytes, self._bytes + size)
        self._bytes += size
        attempt.bytes += size

    async def begin(self, request: AgentRequest, tokens: int) -> None:
        """The request is a call that has not been answered before, and may use so many tokens. While calls under way may
        use all that is left, it waits: else any number of them would pass a total together. Raises LimitReachedError where
        one is reached, and ApiError where its agent goes away meanwhile. What follows its first call (the log-probabilities
        of its prompt) is let through, or the agent would get an error for a call that is in the record."""
        while self._totals and not self._begun and (blocking := self._blocking()) is not None:
            await blocking.wait(request)
        self._begun = True
        tokens = max(1, tokens)
        self._reserved.append(tokens)
        for usage in self._usages:
            usage.begun += 1
            usage.reserved += tokens

    def _blocking(self) -> Usage | None:
        """The usage whose calls under way may use up what is left of it."""
        for name, limit, usage in self._totals:
            _check_totals(name, limit, usage)
        for _, limit, usage in self._totals:
            if limit.max_tokens is not None and usage.tokens + usage.reserved >= limit.max_tokens:
                return usage
        return None

    def record(self, calls: Sequence[Call]) -> None:
        """The choices of the call are in the store."""
        for usage in self._usages:
            for call in calls:
                usage.add(call)
        self._end()

    def count_prompt(self, tokens: int) -> None:
        """The call only read a prompt: there is no record of it, and gateways that read the totals from records miss it."""
        for usage in self._usages:
            usage.calls += 1
            usage.tokens += tokens
        self._end()

    def leave(self) -> None:
        """The request has been answered, or never will be."""
        while self._reserved:
            self._end()
        for attempt in self._usages[:1]:
            attempt.requests -= 1
            attempt.bytes -= self._bytes
        self._usages = ()

    def _end(self) -> None:
        """The call under way is counted, or never will be; whoever waits for it finds it counted."""
        tokens = self._reserved.pop() if self._reserved else 0
        for usage in self._usages if tokens else ():
            usage.begun -= 1
            usage.reserved -= tokens
            if usage.waiting:
                usage.wake()


class CallLimits:
    """The limits of all attempts and runs in use. Use from one event loop."""

    def __init__(
        self,
        store: LightningStore,
        server: ServerLimits | None = None,
        *,
        max_attempts: int = MAX_ATTEMPTS,
        max_runs: int = MAX_RUNS,
    ) -> None:
        self._store = store
        self._server = server or ServerLimits()
        self._runs = LastUsed[str, _Run](_Run, max_runs)
        self._attempts = LastUsed[tuple[str, int], Usage](Usage, max_attempts)

    async def enter(
        self,
        rollout: Rollout,
        number: int,
        length: int = 0,
        *,
        resources: list[Resource] | None = None,
        token: Token | None = None,
        judge: bool = False,
    ) -> Admission:
        """A request of an attempt has come, of so many bytes as far as it says. Raises ApiError where there are too many,
        and StoreError. Without the run's `resources` only the server's limits hold. `token`: the serving key that it came
        with. `judge`: it is not the attempt's agent that asks, whose limits are its own."""
        usage = self._attempts.use((rollout.id, number))
        bounds: list[Bound] = []
        usages = [usage]
        run = None
        if resources is not None:
            run = self._runs.use(rollout.run_id)
            if run.resources is not resources:
                run.take(resources)
            usages.append(run.usage)
            if run.limits is not None:
                own = LimitConfig() if judge else run.limits.attempt
                bounds += [("limits.attempt", own, usage), ("limits.run", run.limits.run, run.usage)]
                if run.limits.attempt.has_totals:
                    await self._fresh(usage, ATTEMPT_AGE_S, lambda: self._read_attempt(rollout, number, usage))
            if token is not None:
                usages.append(run.keys[token.id])
                bounds += _of_key(run, token, usages[-1])
            if bounds:
                await self._read_totals(run, rollout.run_id, bounds[1:])
        server = self._server
        if usage.requests >= server.max_parallel_requests:  # nothing is awaited from here on: what is checked holds
            most = server.max_parallel_requests
            sentence = f"{most} requests are under way, which is the limit; try again when one has ended"
            raise LimitReachedError("--max-parallel-requests of the server", sentence, passes=True)
        if usage.bytes + length > server.max_request_bytes:
            raise _too_many_bytes(server.max_request_bytes, length)
        return Admission(server, usages, bounds, run)

    async def check_key(self, token: Token, resources: list[Resource]) -> None:
        """Raises LimitReachedError where a serving key has used what it may: it opens no session then. And ApiError,
        StoreError."""
        run_id = str(token.run_id)
        run = self._runs.use(run_id)
        if run.resources is not resources:
            run.take(resources)
        bounds = _of_key(run, token, run.keys[token.id])
        await self._read_totals(run, run_id, bounds)
        for name, limit, used in bounds:
            _check_totals(name, limit, used)

    def enter_client(self, token_id: str, length: int) -> Admission:
        """A request of a serving key has come, whose session its body may name. Raises ApiError where the key's bodies that
        are being read are too large together."""
        usage = self._attempts.use((token_id, 0))
        admission = Admission(self._server, [usage])
        try:
            admission.take(length)
        except ApiError:
            admission.leave()
            raise
        admission.take(-length)
        return admission

    def forget(self, rollout_ids: Iterable[str]) -> None:
        """These rollouts' attempts have ended; those beyond the third are forgotten when others come."""
        for rollout_id in rollout_ids:
            for number in (1, 2, 3):
                self._attempts.drop((rollout_id, number))

    def learn(self, calls: Iterable[Call]) -> None:
        """Another gateway recorded these through this server."""
        for call in calls:
            run = self._runs.get(call.run_id)
            if run is None:
                continue
            run.usage.shared = True  # a call does not say whose key it is of: that is read from the store
            for usage in (run.usage, self._attempts.get((call.rollout_id, call.attempt))):
                if usage is not None:
                    usage.add(call)

    async def leave_span(self, rollout: Rollout, number: int, reached: ApiError) -> None:
        """Record on the rollout that a limit was reached, the first time for each, the model's context among them."""
        usage = self._attempts.use((rollout.id, number))
        setting = reached.setting if isinstance(reached, LimitReachedError) else OUTGROWN
        if setting in usage.reported:
            return
        usage.reported.add(setting)
        about = {"setting": setting, "error": reached.message}
        await self._store.append_spans([gateway_span(rollout, number, LIMIT_REACHED, about, reached.message)])

    async def _read_attempt(self, rollout: Rollout, number: int, usage: Usage) -> None:
        found = Usage()
        for call in await self._store.calls([rollout.id], number):
            found.add(call)
        usage.raise_to(found.calls, found.tokens)

    async def _read_totals(self, run: _Run, run_id: str, bounds: Sequence[Bound]) -> None:
        """Know the totals of the run and of its keys, where one of the bounds needs them."""

        async def read() -> None:
            for name, totals in (await run.recorded.read(self._store, run_id)).items():
                (run.usage if name == OF_RUN else run.keys[name]).raise_to(*totals)

        if any(limit.has_totals for _, limit, _ in bounds):
            await self._fresh(run.usage, RUN_AGE_S, read)

    async def _fresh(self, usage: Usage, age_s: float, read: Callable[[], Awaitable[None]]) -> None:
        """Read totals that are old, one reader at a time."""
        if self._is_old(usage, age_s):
            async with usage.reading:
                if self._is_old(usage, age_s):
                    started_s = time.monotonic()
                    await read()
                    usage.read_s = started_s

    def _is_old(self, usage: Usage, age_s: float) -> bool:
        if usage.read_s == float("-inf"):
            return True
        return (self._store.shared or usage.shared) and time.monotonic() - usage.read_s >= age_s


class LastUsed(Generic[K, V]):
    """Values of the keys used last, at most `limit`, and those that a request under way holds."""

    def __init__(self, new: Callable[[], V], limit: int) -> None:
        self._new = new
        self._limit = limit
        self._alive: WeakValueDictionary[K, V] = WeakValueDictionary()
        self._recent: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        return self._alive.get(key)

    def drop(self, key: K) -> None:
        """Forget the value of a key, unless a request under way holds it."""
        self._recent.pop(key, None)

    def use(self, key: K) -> V:
        """The value of a key, a new one where none is known."""
        value = self._alive.get(key)
        if value is None:
            value = self._alive[key] = self._new()
        self._recent[key] = value
        self._recent.move_to_end(key)
        if len(self._recent) > self._limit:
            self._recent.popitem(last=False)
        return value


def _too_many_bytes(most: int, size: int) -> ApiError:
    """The refusal of a request of `size` bytes, alone or with others under way more than allowed."""
    setting = "--max-request-bytes of the server"
    if size > most:
        return ApiError(f"the body is larger than {most} bytes ({setting})", status=413, code="body_too_large")
    sentence = f"the requests under way have more than {most} bytes; try again when one has ended"
    return LimitReachedError(setting, sentence, passes=True)


def _check_totals(name: str, limit: LimitConfig, usage: Usage) -> None:
    whose = "the run" if name == "limits.run" else "this key" if name.startswith("limits.keys.") else "this attempt"
    if limit.max_calls is not None and usage.calls + usage.begun >= limit.max_calls:
        sentence = f"{whose} has made the {limit.max_calls} model calls that it may make"
        raise LimitReachedError(f"{name}.max_calls", sentence, passes=False)
    if limit.max_tokens is not None and usage.tokens >= limit.max_tokens:
        sentence = f"{whose} has used {usage.tokens} of {limit.max_tokens} tokens"
        raise LimitReachedError(f"{name}.max_tokens", sentence, passes=False)


def _of_key(run: _Run, token: Token, usage: Usage) -> list[Bound]:
    """The bounds of a serving key, by its name."""
    limit = None if run.limits is None else run.limits.keys.get(token.name)
    return [] if limit is None else [(f"limits.keys.{token.name}", limit, usage)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUsage:
    """One serving key, what it has used, and what it may."""

    token: str
    name: str
    calls: int
    tokens: int
    limits: Mapping[str, int]
    """The bounds of its name that are set."""


async def read_key_usage(store: LightningStore, run_id: str) -> list[KeyUsage]:
    """The usage of each serving key of a run, those that ended too, in the order in which they were made. Reads all calls of
    the run. Raises NotFoundError, ConfigError and StoreError."""
    found = await store.resources(run_id, LIMITS_RESOURCE)
    limits = parse_settings(LimitsConfig, found[0].value, "limits", ".") if found else LimitsConfig()
    usages = await RunUsage().read(store, run_id)
    keys = [token for token in await store.tokens(run_id) if token.role == "client"]
    return [
        KeyUsage(
            token=key.id,
            name=key.name,
            calls=usages.get(key.id, (0, 0))[0],
            tokens=usages.get(key.id, (0, 0))[1],
            limits=limits.keys.get(key.name, LimitConfig()).model_dump(exclude_none=True),
        )
        for key in keys
    ]


def _key_of(rollout: Rollout) -> str | None:
    """The id of the serving key that opened a session; None of a rollout that is none."""
    return str(rollout.task["key"]) if rollout.kind == "session" and "key" in rollout.task else None


def _count(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0
