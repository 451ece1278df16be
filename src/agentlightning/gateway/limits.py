"""CallLimits: what one agent, one serving key, and all of a run together may use of the gateway and of models.

Driven by the proxy, which enters every request before its body is read, and by policy/calls.py and external/calls.py, which
begin each call that is not a repetition and say what it used. Bounds of the run are its resource of kind ``limits``; the
server's own hold for each attempt besides. Totals are counted as calls are recorded. A gateway that does not know them reads
them from the calls in the store, once; where other gateways record calls, too, from time to time: there the calls of the
others since then are not counted. Without totals among the bounds nothing is read. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentlightning.config.external import ExternalModelConfig
from agentlightning.config.limits import LimitConfig, LimitsConfig
from agentlightning.config.run import parse_settings
from agentlightning.errors import ConfigError
from agentlightning.gateway.external.directory import ExternalDirectory, RunModels
from agentlightning.gateway.gateway_span import gateway_span
from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.gateway.usage import MINUTE_NS, OF_RUN, Cost, RunUsage, Usage
from agentlightning.protocols.base import ApiError
from agentlightning.records import Call, Resource, Rollout
from agentlightning.store.base import LightningStore
from agentlightning.store.tokens import Token

K = TypeVar("K")
V = TypeVar("V")

LIMIT_REACHED = "gateway.limit_reached"
"""Name of the span that the first refusal by each limit leaves in an attempt."""
RETRY_AFTER_S = 1
"""Seconds after which a refusal that will pass may be tried again."""
ATTEMPT_AGE_S = 5.0
RUN_AGE_S = 30.0
"""Totals are read again after so long where other gateways share the store."""
MAX_ATTEMPTS = 4096
MAX_RUNS = 256
"""Attempts and runs whose use is remembered: the ones used last, and those with a request under way."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of every attempt that the operator of the server sets: they protect the server, not a budget."""

    max_parallel_requests: int = 256
    max_request_bytes: int = 256 * 1024 * 1024


class LimitReachedError(ApiError):
    """A request beyond a limit. `passes`: the same request may be served later."""

    def __init__(self, setting: str, sentence: str, *, passes: bool, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(
            f"{sentence} ({setting})",
            status=429,
            type="requests" if passes else "insufficient_quota",
            code="rate_limit_exceeded" if passes else "insufficient_quota",
            retry_after_s=retry_after_s if passes else None,
            final=not passes,
        )
        self.setting = setting


@dataclass(slots=True, eq=False)
class UsageNow(Usage):
    """The totals of an attempt, a key or a run in use, and its requests under way."""

    requests: int = 0
    """Under way."""
    bytes: int = 0
    """Of the requests under way."""
    begun: int = 0
    """Calls under way, which are not recorded yet."""
    entering: int = 0
    """Requests that are being checked."""
    read_s: float = float("-inf")
    """Start of the last read of the totals, by the monotonic clock."""
    shared: bool = False
    """Other gateways record calls of it, too: it is read again from time to time."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    told: set[str] = field(default_factory=set)
    """Settings whose refusals have left a span."""

    @property
    def is_busy(self) -> bool:
        """True where forgetting it would lose count of requests."""
        return self.requests > 0 or self.entering > 0


@dataclass(slots=True, eq=False)
class _Run:
    """A run in use."""

    resources: list[Resource] = field(default_factory=list)
    """The ones that the limits come from."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    models: RunModels = field(default_factory=RunModels)
    """For the prices of calls, where they count."""
    usage: UsageNow = field(default_factory=UsageNow)
    keys: dict[str, UsageNow] = field(default_factory=lambda: defaultdict(UsageNow))
    """By the id of a serving key."""
    recorded: RunUsage = field(default_factory=RunUsage)

    def cost(self, call: Call, prompt_tokens: int, sampled_tokens: int) -> float:
        """US dollars of a call."""
        if call.policy:
            return self.limits.cost(prompt_tokens, sampled_tokens)
        external = self.models.find(call.model)
        return 0.0 if external is None else external.settings.cost(prompt_tokens, sampled_tokens)


Bound = tuple[str, LimitConfig, UsageNow]
"""A limit with the name of its table, and what counts against it."""


class Admission:
    """One request's place within the limits; `leave` must follow."""

    __slots__ = ("_begun", "_bounds", "_bytes", "_cost", "_now_ns", "_usages")

    def __init__(
        self, bounds: Sequence[Bound], usages: Sequence[UsageNow], cost: Cost, now_ns: Callable[[], int]
    ) -> None:
        self._bounds = bounds
        self._usages = usages
        self._cost = cost
        self._now_ns = now_ns
        self._bytes = 0
        self._begun = 0
        """Calls under way: a request with several prompts has several."""
        for usage in usages:
            usage.requests += 1

    @property
    def counts_tokens(self) -> bool:
        """True where the call counts by its tokens."""
        return any(limit.counts_tokens for _, limit, _ in self._bounds)

    def take(self, size: int) -> None:
        """Count so many bytes of the request. Raises ApiError where there are too many under way."""
        for name, limit, usage in self._bounds:
            _check_bytes(name, limit, usage, size, self._bytes)
        self._bytes += size
        for usage in self._usages:
            usage.bytes += size

    def begin(self) -> None:
        """The request is a call that has not been answered before. Raises ApiError where a total is reached."""
        for name, limit, usage in self._bounds:
            _check_totals(name, limit, usage, self._now_ns())
        self._begun += 1
        for usage in self._usages:
            usage.begun += 1

    def record(self, calls: Sequence[Call], external: ExternalModelConfig | None = None) -> None:
        """The choices of the call are in the store."""
        self._end_call()
        cost = self._cost if external is None else lambda _, prompt, sampled: external.cost(prompt, sampled)
        for usage in self._usages:
            for call in calls:
                usage.add(call, cost, self._now_ns())

    def count_prompt(self, tokens: int) -> None:
        """The call only read a prompt: there is no record of it, and gateways that read the totals from records miss it."""
        self._end_call()
        for usage in self._usages:
            usage.count_prompt(tokens, self._now_ns())

    def leave(self) -> None:
        """The request has been answered, or never will be."""
        while self._begun:
            self._end_call()
        for usage in self._usages:
            usage.requests -= 1
            usage.bytes -= self._bytes
        self._usages = ()

    def _end_call(self) -> None:
        if self._begun:
            self._begun -= 1
            for usage in self._usages:
                usage.begun -= 1


class CallLimits:
    """The limits of all attempts and runs in use. Use from one event loop."""

    def __init__(
        self,
        store: LightningStore,
        watcher: ResourceWatcher,
        directory: ExternalDirectory,
        server: ServerLimits | None = None,
        *,
        max_attempts: int = MAX_ATTEMPTS,
        max_runs: int = MAX_RUNS,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        server = server or ServerLimits()
        self._store = store
        self._watcher = watcher
        self._directory = directory
        self._now_ns = now_ns
        self._server = LimitConfig(
            max_parallel_requests=server.max_parallel_requests, max_request_bytes=server.max_request_bytes
        )
        self._runs = _LastUsed[str, _Run](_Run, max_runs, lambda run: run.usage.is_busy)
        self._attempts = _LastUsed[tuple[str, int], UsageNow](UsageNow, max_attempts, lambda usage: usage.is_busy)

    async def enter(
        self, rollout: Rollout, number: int, length: int = 0, *, of_run: bool = True, token: Token | None = None
    ) -> Admission:
        """A request of an attempt has come, of so many bytes as far as it tells. Raises ApiError where there are too many,
        and StoreError. Without `of_run` only the server's limits hold: it is no part of the run any more. `token`: the
        serving key that it came with."""
        usage = self._attempts.use((rollout.id, number))
        bounds: list[Bound] = [("server", self._server, usage)]
        usages = [usage]
        run = self._runs.use(rollout.run_id) if of_run else _Run()
        if of_run:
            usages.append(run.usage)
            for used in usages:
                used.entering += 1
            try:
                limits = await self._limits(run, rollout.run_id)
                if limits.attempt.has_totals:
                    await self._read_attempt(run, rollout, number, usage)
                bounds += [("limits.attempt", limits.attempt, usage), ("limits.run", limits.run, run.usage)]
                if token is not None:
                    usages.append(run.keys[token.id])
                    usages[-1].entering += 1
                    bounds += _of_key(limits, token, usages[-1])
                if any(limit.has_totals for _, limit, _ in bounds[2:]):
                    await self._read_run(run, rollout.run_id)
            finally:
                for used in usages:
                    used.entering -= 1
        for name, limit, used in bounds:  # nothing is waited for from here on, so that what is checked holds
            _check_requests(name, limit, used)
            _check_bytes(name, limit, used, length)
        return Admission(bounds, usages, run.cost, self._now_ns)

    async def check_key(self, token: Token) -> None:
        """Raises LimitReachedError where a serving key has used what it may: it opens no session then. And ApiError,
        StoreError."""
        run_id = str(token.run_id)
        run = self._runs.use(run_id)
        run.usage.entering += 1
        try:
            bounds = _of_key(await self._limits(run, run_id), token, run.keys[token.id])
            if any(limit.has_totals for _, limit, _ in bounds):
                await self._read_run(run, run_id)
        finally:
            run.usage.entering -= 1
        for name, limit, used in bounds:
            _check_totals(name, limit, used, self._now_ns())

    def enter_client(self, token_id: str, length: int) -> Admission:
        """A request of a serving key has come, whose session its body may name. Raises ApiError where the key's bodies that
        are being read are too large together."""
        usage = self._attempts.use((token_id, 0))
        limit = LimitConfig(max_request_bytes=self._server.max_request_bytes)
        _check_bytes("server", limit, usage, length)
        return Admission([("server", limit, usage)], [usage], _Run().cost, self._now_ns)

    def learn(self, calls: Iterable[Call]) -> None:
        """Another gateway recorded these through this server."""
        for call in calls:
            run = self._runs.get(call.run_id)
            if run is None:
                continue
            run.usage.shared = True  # a call does not say whose key it is of: that is read from the store
            attempt = self._attempts.get((call.rollout_id, call.attempt))
            for usage in (run.usage, attempt):
                if usage is not None:
                    usage.add(call, run.cost, self._now_ns())

    async def leave_span(self, rollout: Rollout, number: int, reached: LimitReachedError) -> None:
        """Tell the rollout of a refusal, of the first by each limit."""
        usage = self._attempts.use((rollout.id, number))
        if reached.setting in usage.told:
            return
        usage.told.add(reached.setting)
        told = {"setting": reached.setting, "error": reached.message}
        await self._store.append_spans([gateway_span(rollout, number, LIMIT_REACHED, told, reached.message)])

    # --- what is known of a run -------------------------------------------------------------------------------------

    async def _limits(self, run: _Run, run_id: str) -> LimitsConfig:
        resources = await self._watcher.resources(run_id)
        if run.resources is not resources:
            limits = _limits(resources)
            if any(limit.counts_spend for limit in limits.tables.values()):
                run.models = await self._directory.models(run_id)
            run.limits, run.resources = limits, resources
        return run.limits

    async def _read_attempt(self, run: _Run, rollout: Rollout, number: int, usage: UsageNow) -> None:
        async with self._old(usage, ATTEMPT_AGE_S) as old:
            if old:
                found = Usage()
                for call in await self._store.calls([rollout.id], number):
                    found.add(call, run.cost, self._now_ns())
                usage.raise_to(found)

    async def _read_run(self, run: _Run, run_id: str) -> None:
        """Know the totals of the run and of its keys."""
        async with self._old(run.usage, RUN_AGE_S) as old:
            if old:
                found = await run.recorded.read(self._store, run_id, run.cost, self._now_ns())
                for name, usage in found.items():
                    (run.usage if name == OF_RUN else run.keys[name]).raise_to(usage)

    @asynccontextmanager
    async def _old(self, usage: UsageNow, age_s: float) -> AsyncIterator[bool]:
        """True for one at a time, whose totals are old; they are new once it has read them."""
        if not self._is_old(usage, age_s):
            yield False
            return
        async with usage.reading:
            old, started_s = self._is_old(usage, age_s), time.monotonic()
            yield old
            if old:
                usage.read_s = started_s

    def _is_old(self, usage: UsageNow, age_s: float) -> bool:
        if usage.read_s == float("-inf"):
            return True
        return (self._store.shared or usage.shared) and time.monotonic() - usage.read_s >= age_s


class _LastUsed(Generic[K, V]):
    """Values of the keys used last: at most `limit`, and those that are busy."""

    def __init__(self, new: Callable[[], V], limit: int, busy: Callable[[V], bool]) -> None:
        self._new = new
        self._limit = limit
        self._busy = busy
        self._known: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        return self._known.get(key)

    def use(self, key: K) -> V:
        """Returns what is known, or anew."""
        value = self._known.get(key)
        if value is None:
            value = self._known[key] = self._new()
            if len(self._known) > self._limit:
                idle = (one for one, held in self._known.items() if one != key and not self._busy(held))
                if (oldest := next(idle, None)) is not None:
                    del self._known[oldest]
        else:
            self._known.move_to_end(key)
        return value


def _check_bytes(name: str, limit: LimitConfig, usage: UsageNow, size: int, before: int = 0) -> None:
    """ApiError where `size` bytes more are too many, of a request that has sent so many `before`."""
    most = limit.max_request_bytes
    if most is None or usage.bytes + size <= most:
        return
    setting = _setting(name, "max_request_bytes")
    if before + size > most:
        raise ApiError(f"the body is larger than {most} bytes ({setting})", status=413, code="body_too_large")
    sentence = f"the requests under way have more than {most} bytes; try again when one has ended"
    raise LimitReachedError(setting, sentence, passes=True)


def _check_requests(name: str, limit: LimitConfig, usage: UsageNow) -> None:
    most = limit.max_parallel_requests
    if most is not None and usage.requests >= most:
        raise LimitReachedError(
            _setting(name, "max_parallel_requests"),
            f"{most} requests are under way, which is the limit; try again when one has ended",
            passes=True,
        )


def _check_totals(name: str, limit: LimitConfig, usage: UsageNow, now_ns: int) -> None:
    whose = "the run" if name == "limits.run" else "this key" if name.startswith("limits.keys.") else "this attempt"
    day_tokens, day_spend = usage.on_day(now_ns)
    most = limit.max_calls_per_minute
    if most is not None and usage.recent(now_ns) + usage.begun >= most:
        next_s = 1 + (usage.starts[0] + MINUTE_NS - now_ns) // 10**9 if usage.starts else RETRY_AFTER_S
        sentence = f"{whose} has begun the {most} model calls that it may begin in a minute; try again in {next_s} s"
        raise LimitReachedError(f"{name}.max_calls_per_minute", sentence, passes=True, retry_after_s=next_s)
    reached = {
        "max_calls": (usage.calls + usage.begun, limit.max_calls, "made the {1} model calls that it may make"),
        "max_tokens": (usage.tokens, limit.max_tokens, "used {0} of {1} tokens"),
        "max_tokens_per_day": (day_tokens, limit.max_tokens_per_day, "used {0} of {1} tokens of this day (UTC)"),
        "max_budget": (usage.spend, limit.max_budget, "spent {0:.4g} of {1:g} US dollars"),
        "max_budget_per_day": (
            day_spend,
            limit.max_budget_per_day,
            "spent {0:.4g} of {1:g} US dollars of this day (UTC)",
        ),
    }
    for setting, (used, bound, sentence) in reached.items():
        if bound is not None and used >= bound:
            raise LimitReachedError(f"{name}.{setting}", f"{whose} has {sentence.format(used, bound)}", passes=False)


def _of_key(limits: LimitsConfig, token: Token, usage: UsageNow) -> list[Bound]:
    """The bounds of a serving key, by its name."""
    limit = limits.keys.get(token.name)
    return [] if limit is None else [(f"limits.keys.{token.name}", limit, usage)]


def _setting(name: str, setting: str) -> str:
    return f"{name}.{setting}" if name != "server" else f"--{setting.replace('_', '-')} of the server"


def _limits(resources: Sequence[Resource]) -> LimitsConfig:
    """The limits among a run's resources. Raises ApiError where they are misconfigured: nothing would be limited."""
    for one in resources:
        if one.kind == "limits":
            try:
                return parse_settings(LimitsConfig, one.value, "limits", ".")
            except ConfigError as cause:
                raise ApiError(str(cause), status=502, type="server_error", code="limits_misconfigured") from cause
    return LimitsConfig()
