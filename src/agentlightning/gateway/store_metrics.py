"""Prometheus metrics of the store: queued and running rollouts, duration of writes.

Numbers of runs are read when somebody looks, never in between; writes are counted once a commit, from the thread that makes
it. Driven by the application; knows a store only by its method `statistics`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from agentlightning.errors import StoreError
from agentlightning.store.base import LightningStore
from agentlightning.types import RunStatistics

WRITE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 60)
GROUP = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
LOOK_S = 2.0
"""Timeout of a scrape's read; a store that takes longer counts as down, and the scrape does not hang with it."""


class StoreMetrics(Collector):  # type: ignore[misc]  # the package has no types
    """The store's numbers, in a registry."""

    def __init__(self, store: LightningStore, registry: CollectorRegistry) -> None:
        self._store = store
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

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yields the gauges for the registry."""
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
