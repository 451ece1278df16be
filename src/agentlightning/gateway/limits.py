"""CallLimits: what one agent, and the agents of one run together, may use of the gateway and of external models.

Driven by the proxy, which enters every request before its body is read, and by policy/calls.py and external/calls.py, which
begin each call that is not a repetition and say what it used. Bounds of the run are its resource of kind ``limits``; the
server's own hold for each attempt besides. Totals are counted as calls are recorded. A gateway that does not know them reads
them from the calls in the store, once; where other gateways record calls, too, from time to time: there the calls of the
others since then are not counted. Without totals among the bounds nothing is read. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentlightning.config import parse_settings
from agentlightning.config_external import ExternalModelConfig
from agentlightning.config_limits import LimitConfig, LimitsConfig
from agentlightning.errors import ConfigError
from agentlightning.gateway.external.directory import ExternalDirectory, RunModels
from agentlightning.gateway.gateway_span import gateway_span
from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.protocols.base import ApiError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import read_calls, read_rollouts
from agentlightning.types import Call, Resource, Rollout

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

    def __init__(self, setting: str, sentence: str, *, passes: bool) -> None:
        super().__init__(
            f"{sentence} ({setting})",
            status=429,
            type="requests" if passes else "insufficient_quota",
            code="rate_limit_exceeded" if passes else "insufficient_quota",
            retry_after_s=RETRY_AFTER_S if passes else None,
            final=not passes,
        )
        self.setting = setting


@dataclass(slots=True, eq=False)
class Usage:
    """The totals of an attempt or a run, and its requests under way."""

    calls: int = 0
    tokens: int = 0
    spend: float = 0.0
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
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    told: set[str] = field(default_factory=set)
    """Settings whose refusals have left a span."""

    @property
    def is_busy(self) -> bool:
        """True where forgetting it would lose count of requests."""
        return self.requests > 0 or self.entering > 0

    def add(self, call: Call, external: ExternalModelConfig | None) -> None:
        """Count a recorded call. Further choices of a call have sampled tokens of their own and nothing else."""
        first = "." not in call.id
        self.calls += first
        if call.policy:  # of calls that are only counted the usage tells what was sampled
            sampled = len(call.sampled_ids) or _count(call.usage.get("sampled_tokens"))
            self.tokens += sampled + (call.prompt_tokens if first else 0)
            return
        prompt, sampled = (_count(call.usage.get(name)) for name in ("prompt_tokens", "sampled_tokens"))
        self.tokens += prompt + sampled
        self.spend += external.cost(prompt, sampled) if external is not None else 0.0

    def raise_to(self, other: Usage) -> None:
        """Take over the totals of `other` where they are larger: totals only grow, and each may know of calls that the
        other does not."""
        self.calls = max(self.calls, other.calls)
        self.tokens = max(self.tokens, other.tokens)
        self.spend = max(self.spend, other.spend)


@dataclass(slots=True, eq=False)
class _Run:
    """A run in use."""

    resources: list[Resource] = field(default_factory=list)
    """The ones that the limits come from."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    models: RunModels = field(default_factory=RunModels)
    """For the prices of calls, where they count."""
    usage: Usage = field(default_factory=Usage)
    finished: Usage = field(default_factory=Usage)
    """Totals of the rollouts up to `after`, which have all finished: they are read once."""
    after: str | None = None


Bound = tuple[str, LimitConfig, Usage]
"""A limit with the name of its table, and what counts against it."""


class Admission:
    """One request's place within the limits; `leave` must follow."""

    __slots__ = ("_begun", "_bounds", "_bytes", "_usages")

    def __init__(self, bounds: Sequence[Bound], usages: Sequence[Usage]) -> None:
        self._bounds = bounds
        self._usages = usages
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
            _check_totals(name, limit, usage)
        self._begun += 1
        for usage in self._usages:
            usage.begun += 1

    def record(self, calls: Sequence[Call], external: ExternalModelConfig | None = None) -> None:
        """The choices of the call are in the store."""
        self._end_call()
        for usage in self._usages:
            for call in calls:
                usage.add(call, external)

    def count_prompt(self, tokens: int) -> None:
        """The call only read a prompt: there is no record of it, and gateways that read the totals from records miss it."""
        self._end_call()
        for usage in self._usages:
            usage.calls += 1
            usage.tokens += tokens

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
    ) -> None:
        server = server or ServerLimits()
        self._store = store
        self._watcher = watcher
        self._directory = directory
        self._server = LimitConfig(
            max_parallel_requests=server.max_parallel_requests, max_request_bytes=server.max_request_bytes
        )
        self._runs = _LastUsed[str, _Run](_Run, max_runs, lambda run: run.usage.is_busy)
        self._attempts = _LastUsed[tuple[str, int], Usage](Usage, max_attempts, lambda usage: usage.is_busy)

    async def enter(self, rollout: Rollout, number: int, length: int = 0, *, of_run: bool = True) -> Admission:
        """A request of an attempt has come, of so many bytes as far as it tells. Raises ApiError where there are too many,
        and StoreError. Without `of_run` only the server's limits hold: it is no part of the run any more."""
        usage = self._attempts.use((rollout.id, number))
        bounds: list[Bound] = [("server", self._server, usage)]
        usages = [usage]
        if of_run:
            run = self._runs.use(rollout.run_id)
            usages.append(run.usage)
            for used in usages:
                used.entering += 1
            try:
                limits = await self._limits(run, rollout.run_id)
                if limits.attempt.has_totals or limits.run.has_totals:
                    await self._read(run, rollout, number, usage)
            finally:
                for used in usages:
                    used.entering -= 1
            bounds += [("limits.attempt", limits.attempt, usage), ("limits.run", limits.run, run.usage)]
        for name, limit, used in bounds:  # nothing is waited for from here on, so that what is checked holds
            _check_requests(name, limit, used)
            _check_bytes(name, limit, used, length)
        return Admission(bounds, usages)

    def enter_client(self, token_id: str, length: int) -> Admission:
        """A request of a serving key has come, whose session its body may name. Raises ApiError where the key's bodies that
        are being read are too large together."""
        usage = self._attempts.use((token_id, 0))
        limit = LimitConfig(max_request_bytes=self._server.max_request_bytes)
        _check_bytes("server", limit, usage, length)
        return Admission([("server", limit, usage)], [usage])

    def learn(self, calls: Iterable[Call]) -> None:
        """Another gateway recorded these through this server."""
        for call in calls:
            run = self._runs.get(call.run_id)
            if run is None:
                continue
            run.usage.add(call, _price(run, call))
            attempt = self._attempts.get((call.rollout_id, call.attempt))
            if attempt is not None:
                attempt.add(call, _price(run, call))

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
            if limits.attempt.max_budget is not None or limits.run.max_budget is not None:
                run.models = await self._directory.models(run_id)
            run.limits, run.resources = limits, resources
        return run.limits

    async def _read(self, run: _Run, rollout: Rollout, number: int, usage: Usage) -> None:
        """Know the totals that count."""
        if run.limits.attempt.has_totals and self._is_old(usage, ATTEMPT_AGE_S):
            async with usage.reading:
                if self._is_old(usage, ATTEMPT_AGE_S):
                    started_s = time.monotonic()
                    found = Usage()
                    for call in await self._store.calls([rollout.id], number):
                        found.add(call, _price(run, call))
                    usage.raise_to(found)
                    usage.read_s = started_s
        if run.limits.run.has_totals and self._is_old(run.usage, RUN_AGE_S):
            async with run.usage.reading:
                if self._is_old(run.usage, RUN_AGE_S):
                    started_s = time.monotonic()
                    await self._read_run(run, rollout.run_id)
                    run.usage.read_s = started_s

    def _is_old(self, usage: Usage, age_s: float) -> bool:
        if usage.read_s == float("-inf"):
            return True
        return self._store.shared and time.monotonic() - usage.read_s >= age_s

    async def _read_run(self, run: _Run, run_id: str) -> None:
        found, in_order = Usage(), True
        async for portion in read_rollouts(self._store, RolloutQuery(run_id=run_id, after=run.after)):
            begun = [rollout for rollout in portion if rollout.attempt]
            calls = await read_calls(self._store, begun)
            in_order = in_order and all(rollout.finished_ns is not None for rollout in portion)
            for call in calls:
                (run.finished if in_order else found).add(call, _price(run, call))
            if in_order:
                run.after = portion[-1].id
        found.calls += run.finished.calls
        found.tokens += run.finished.tokens
        found.spend += run.finished.spend
        run.usage.raise_to(found)


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


def _check_bytes(name: str, limit: LimitConfig, usage: Usage, size: int, before: int = 0) -> None:
    """ApiError where `size` bytes more are too many, of a request that has sent so many `before`."""
    most = limit.max_request_bytes
    if most is None or usage.bytes + size <= most:
        return
    setting = _setting(name, "max_request_bytes")
    if before + size > most:
        raise ApiError(f"the body is larger than {most} bytes ({setting})", status=413, code="body_too_large")
    sentence = f"the requests under way have more than {most} bytes; try again when one has ended"
    raise LimitReachedError(setting, sentence, passes=True)


def _check_requests(name: str, limit: LimitConfig, usage: Usage) -> None:
    most = limit.max_parallel_requests
    if most is not None and usage.requests >= most:
        raise LimitReachedError(
            _setting(name, "max_parallel_requests"),
            f"{most} requests are under way, which is the limit; try again when one has ended",
            passes=True,
        )


def _check_totals(name: str, limit: LimitConfig, usage: Usage) -> None:
    whose = "the run" if name == "limits.run" else "this attempt"
    if limit.max_calls is not None and usage.calls + usage.begun >= limit.max_calls:
        sentence = f"{whose} has made the {limit.max_calls} model calls that it may make"
        raise LimitReachedError(f"{name}.max_calls", sentence, passes=False)
    if limit.max_tokens is not None and usage.tokens >= limit.max_tokens:
        sentence = f"{whose} has used {usage.tokens} of {limit.max_tokens} tokens"
        raise LimitReachedError(f"{name}.max_tokens", sentence, passes=False)
    if limit.max_budget is not None and usage.spend >= limit.max_budget:
        sentence = f"{whose} has spent {usage.spend:.4g} of {limit.max_budget:g} US dollars on external models"
        raise LimitReachedError(f"{name}.max_budget", sentence, passes=False)


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


def _price(run: _Run, call: Call) -> ExternalModelConfig | None:
    external = None if call.policy else run.models.find(call.model)
    return None if external is None else external.settings


def _count(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0
