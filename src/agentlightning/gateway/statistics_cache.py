"""StatisticsCache: the store's numbers, read once for everybody who asks within a few seconds.

Driven by /metrics and by the store's routes. Scrapers and consoles ask again and again, and sizes are a read of everything:
those who ask meanwhile share one read, whose result is given to those who ask soon after. Knows nothing of the numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from agentlightning.records import RunSize, RunStatistics
from agentlightning.store.base import LightningStore

R = TypeVar("R")

MAX_AGE_S = 3.0
MAX_KEPT = 64
"""Lists of runs whose sizes are kept at a time."""


class StatisticsCache:
    """The methods `statistics` and `sizes` of a store, whose results may be `max_age_s` old."""

    def __init__(self, store: LightningStore, max_age_s: float = MAX_AGE_S) -> None:
        self._store = store
        self._max_age_s = max_age_s
        self._reads: dict[object, tuple[asyncio.Future[Any], float]] = {}
        """By what was asked: the read, and when its result is too old; until it has one, that is never."""

    async def statistics(self, run_id: str | None = None) -> list[RunStatistics]:
        """As the store's method."""
        return await self._shared(("statistics", run_id), lambda: self._store.statistics(run_id))

    async def sizes(self, run_ids: Sequence[str] | None = None) -> list[RunSize]:
        """As the store's method."""
        key = None if run_ids is None else tuple(run_ids)
        return await self._shared(("sizes", key), lambda: self._store.sizes(run_ids))

    async def _shared(self, key: object, read: Callable[[], Awaitable[R]]) -> R:
        now = time.monotonic()
        self._reads = {each: kept for each, kept in self._reads.items() if not kept[0].done() or kept[1] > now}
        if key not in self._reads and len(self._reads) >= MAX_KEPT:
            return await read()
        if key not in self._reads:
            reading = asyncio.ensure_future(read())
            self._reads[key] = reading, now
            reading.add_done_callback(lambda done: self._done(key, done))
        # A scrape that gives up leaves the read to the next one, which else would begin another beside it.
        return cast(R, await asyncio.shield(self._reads[key][0]))

    def _done(self, key: object, reading: asyncio.Future[Any]) -> None:
        failed = reading.cancelled() or reading.exception() is not None
        self._reads[key] = reading, time.monotonic() + (0.0 if failed else self._max_age_s)
