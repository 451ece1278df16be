"""Prometheus metrics of a server: the gateway's numbers and the store's, in one registry per app, so that two apps in a
process do not add up.

Driven by the proxy and the application. What changes seldom (engines, runs) is read at a scrape; writes are counted once a
commit, from the thread that makes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

from cachetools import LRUCache
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from agentlightning.errors import StoreError
from agentlightning.records import ABANDONED, Call, RunStatistics
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.base import LightningStore

BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

WRITE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 60)
GROUP = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

MAX_POLICIES = 64
"""Policies whose version is shown, the last ones used: a server sees runs come and go for months."""
LOOK_S = 2.0
"""Timeout of a scrape's read; a store that takes longer counts as down, and the scrape does not hang with it."""

Result = Literal["recorded", "abandoned", "replayed", "joined", "ended", "refused", "failed"]
Engines = Callable[[], Iterable[tuple[str, str, int]]]


class GatewayMetrics:
    """The gateway's own numbers."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        counter, gauge, histogram = (partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram))
        self._calls = counter("agl_calls", "Model calls by wire format and result", ["protocol", "result"])
        self._external = counter("agl_external_calls", "Calls to external models", ["model", "result"])
        self._forks = counter("agl_forks", "Prompts that do not continue a call, by cause", ["cause"])
        self._versions = gauge("agl_policy_version", "Policy version that sampled last", ["run", "policy"])
        self._seconds = histogram("agl_call_seconds", "Time from a request to its recorded answer", buckets=BUCKETS_S)
        self.first_token = histogram(
            "agl_first_token_seconds", "Time from a request to its first token", buckets=FIRST_TOKEN_S
        )
        self._prompt_tokens = counter("agl_prompt_tokens", "Tokens of prompts")
        self._sampled_tokens = counter("agl_sampled_tokens", "Tokens sampled")
        self._untrained_tokens = counter("agl_untrained_tokens", "Sampled tokens that forks left as context only")
        self.in_flight = gauge("agl_calls_in_flight", "Model calls being answered")
        self._spans = counter("agl_spans", "Spans that were recorded")
        self._broken_spans = counter(
            "agl_broken_spans", "Spans that were mended, or of which nothing is left, by cause", ["cause"]
        )
        self._by_result: dict[tuple[str, str], Counter] = {}
        self._added: dict[Counter, float] = {}
        """Increments that the counters do not have yet, which take a lock for each."""
        self._last_versions: LRUCache[tuple[str, str], int] = LRUCache(MAX_POLICIES)

    def record(self, call: Call) -> None:
        """Count a call that was recorded, of a policy or of an external model.

        A call with n > 1 choices is recorded as n; the further ones have sampled tokens of their own and nothing else.
        """
        replayed = call.replayed_id is not None
        if not replayed:
            self._add(self._sampled_tokens, len(call.sampled_ids))
        if "." in call.id:
            return
        self.call(
            call.protocol,
            "abandoned" if call.finish_reason == ABANDONED else "replayed" if replayed else "recorded",
        )
        self._seconds.observe((call.finished_ns - call.started_ns) / 1e9)
        self._add(self._prompt_tokens, call.prompt_tokens)
        if call.fork_cause is not None:
            self._forks.labels(call.fork_cause).inc()
            self._untrained_tokens.inc(call.untrained_tokens)
        if call.versions and not replayed:
            self._version(call.run_id, call.policy, call.versions[-1].version)

    def call(self, protocol: str, result: Result) -> None:
        """Count a call by its result."""
        counter = self._by_result.get((protocol, result))
        if counter is None:
            counter = self._by_result[protocol, result] = self._calls.labels(protocol, result)
        self._add(counter, 1)

    def external(self, model: str, result: Result) -> None:
        """Count a call to an external model; `model` is its name in the configuration."""
        self._external.labels(model, result).inc()

    def spans(self, recorded: int, broken: Mapping[str, int]) -> None:
        """Count spans that programs sent; `broken` by cause."""
        self._spans.inc(recorded)
        for cause, count in broken.items():
            self._broken_spans.labels(cause).inc(count)

    def watch_engines(self, read: Engines) -> None:
        """Show these engines, (url, state, calls in flight) each; `read` is called at every look and must not block."""
        self.registry.register(_EngineStates(read))

    def text(self) -> bytes:
        """The exposition."""
        added, self._added = self._added, {}
        for counter, count in added.items():
            counter.inc(count)
        return bytes(generate_latest(self.registry))

    def _add(self, counter: Counter, count: float) -> None:
        self._added[counter] = self._added.get(counter, 0) + count

    def _version(self, run_id: str, policy: str, version: int) -> None:
        key = (run_id, policy)
        if self._last_versions.get(key) == version:
            return
        if key not in self._last_versions and len(self._last_versions) == MAX_POLICIES:
            oldest, _ = self._last_versions.popitem()
            self._versions.remove(*oldest)
        self._last_versions[key] = version
        self._versions.labels(run_id, policy).set(version)


class _EngineStates(Collector):  # type: ignore[misc]  # the package has no types
    """The state of every engine at the moment that somebody looks."""

    def __init__(self, read: Engines) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        state = GaugeMetricFamily("agl_engine_state", "1 for the state that an engine is in", labels=["url", "state"])
        load = GaugeMetricFamily("agl_engine_calls_in_flight", "Calls at an engine", labels=["url"])
        for url, name, calls in self._read():
            state.add_metric([url, name], 1)
            load.add_metric([url], calls)
        yield state
        yield load


class StoreMetrics(Collector):  # type: ignore[misc]  # the package has no types
    """The store's numbers, and failures of the server's background loops, in a registry."""

    def __init__(self, store: LightningStore, loops: Sequence[BackgroundTasks], registry: CollectorRegistry) -> None:
        self._store = store
        self._loops = loops
        self._numbers: Sequence[RunStatistics] | None = None
        self._seconds = Histogram(
            "agl_store_write_seconds",
            "Time from a write to its commit, of the first of a group",
            buckets=WRITE_S,
            registry=registry,
        )
        self._group = Histogram("agl_store_write_group", "Writes of one commit", buckets=GROUP, registry=registry)
        registry.register(self)
        store.watch_commits(self._commit)

    async def look(self) -> None:
        """Read what goes on in the runs; to be called before the exposition is made."""
        try:
            async with asyncio.timeout(LOOK_S):
                self._numbers = await self._store.statistics()
        except (StoreError, TimeoutError):
            self._numbers = None

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Yields the families for the registry."""
        failures = CounterMetricFamily("agl_background_failures", "Failures of a loop of the server", labels=["task"])
        for name, count in sorted(sum((loops.failures for loops in self._loops), Counts[str]()).items()):
            failures.add_metric([name], count)
        yield failures
        down = sum(len(loops.down) for loops in self._loops)
        yield GaugeMetricFamily("agl_background_down", "Loops that failed and are not started again yet", value=down)
        yield GaugeMetricFamily("agl_store_up", "1 if the store answers", value=float(self._numbers is not None))
        shown = {
            name: GaugeMetricFamily(f"agl_store_{name}", text, labels=["run"])
            for name, text in (
                ("queued", "Rollouts that wait for a worker"),
                ("oldest_queued_seconds", "Age of the rollout that was queued first"),
                ("running", "Rollouts that a worker holds"),
                ("leases_expiring", "Leases that run out within ten seconds, or have"),
                ("workers", "Workers seen within the last minute"),
            )
        }
        for one in self._numbers or ():
            values = (one.queued, one.oldest_queued_s, one.running, one.expiring, one.workers)
            for family, value in zip(shown.values(), values, strict=True):
                family.add_metric([one.run_id], value)
        yield from shown.values()

    def _commit(self, seconds: float, writes: int) -> None:
        self._seconds.observe(seconds)
        self._group.observe(writes)
