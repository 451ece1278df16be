"""Repeats: a request that is sent again is answered as it was, not executed again.

Driven by the verbs' face (verbs.py). The first request of a key executes; one that comes while it does joins it; one that
comes later gets the answer that is kept. Answers are kept for longer than any client goes on sending, in memory and within a
bound: a server that is restarted has none, and store/client.py says what holds then. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

KEPT_S = 600.0
"""Seconds that an answer is kept."""
MOST_BYTES = 64 * 1024 * 1024
"""Of all answers that are kept; the oldest make room."""
OVERHEAD = 500
"""Bytes of an entry, beyond its answer's."""


class Response(NamedTuple):
    """An answer to a verb."""

    status: int
    body: bytes

    @property
    def final(self) -> bool:
        """Whether the same request would never be answered otherwise: not where the server could not serve."""
        return self.status < 499


class _Entry:
    def __init__(self, task: asyncio.Task[Response]) -> None:
        self.task = task
        self.waiting = 0
        self.kept_at = 0.0
        self.size = 0


class Repeats:
    """The requests under way and the answers given lately. Use from one event loop."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, kept_s: float = KEPT_S, most: int = MOST_BYTES
    ) -> None:
        self._clock = clock
        self._kept_s = kept_s
        self._most = most
        self._under_way: dict[str, _Entry] = {}
        self._kept: OrderedDict[str, _Entry] = OrderedDict()
        self._size = 0

    async def answer(self, key: str, work: Callable[[], Coroutine[Any, Any, Response]]) -> Response:
        """The answer to the request of this key, which `work` executes. A caller that is cancelled leaves it to the others
        who wait for it; the last one cancels it."""
        entry = self._kept.get(key) or self._under_way.get(key)
        if entry is None:
            entry = self._under_way[key] = _Entry(asyncio.ensure_future(work()))
            entry.task.add_done_callback(functools.partial(self._keep, key, entry))
        if entry.task.done():
            return entry.task.result()
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiting -= 1
            if not entry.waiting and not entry.task.done():
                entry.task.cancel()
                del self._under_way[key]

    def _keep(self, key: str, entry: _Entry, _: object) -> None:
        if self._under_way.get(key) is entry:
            del self._under_way[key]
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).kept_at < now - self._kept_s:
            self._drop_oldest()
        if entry.task.cancelled() or entry.task.exception() is not None or not entry.task.result().final:
            return
        entry.kept_at, entry.size = now, len(entry.task.result().body) + OVERHEAD
        self._kept[key] = entry
        self._size += entry.size
        while self._size > self._most:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._kept.popitem(last=False)
        self._size -= entry.size
