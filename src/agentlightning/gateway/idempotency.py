"""IdempotencyCache: a request that is sent again is answered as it was, not executed again.

Driven by store_rpc.py. The first request of a key executes; one that comes while it does joins it; one that
comes later gets the answer that is kept. Answers are kept for longer than any client goes on sending, in memory and within a
bound: a server that is restarted has none, and store/client.py says what holds then. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

KEPT_S = 600.0
"""Retention of a response in seconds."""
MAX_BYTES = 64 * 1024 * 1024
"""Bound of all retained responses; the oldest are dropped."""
OVERHEAD = 500
"""Bytes of an entry, beyond its answer's."""


class RpcResponse(NamedTuple):
    """The response to a request."""

    status: int
    body: bytes

    @property
    def final(self) -> bool:
        """True where a repeated request would get the same response: not where the server could not serve."""
        return self.status < 499


class _Entry:
    """A request under way, or the answer to it."""

    def __init__(self) -> None:
        self.response: RpcResponse | None = None
        self.kept_at = 0.0
        self.others: list[asyncio.Future[RpcResponse | None]] = []
        """Waiters with the same key while the request is executing; they get None where it was cancelled."""


class IdempotencyCache:
    """The requests under way and the answers given lately. Use from one event loop."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, kept_s: float = KEPT_S, most: int = MAX_BYTES
    ) -> None:
        self._clock = clock
        self._kept_s = kept_s
        self._most = most
        self._entries: dict[str, _Entry] = {}
        self._kept: deque[tuple[str, _Entry]] = deque()
        """Completed entries, oldest first."""
        self._size = 0

    async def answer(self, key: str, work: Callable[[], Coroutine[Any, Any, RpcResponse]]) -> RpcResponse:
        """The answer to the request of this key, which `work` executes.

        Where the first caller is cancelled (it hung up while it waited), the next one executes it anew.
        """
        while (entry := self._entries.get(key)) is not None:
            if entry.response is not None:
                return entry.response
            other: asyncio.Future[RpcResponse | None] = asyncio.get_running_loop().create_future()
            entry.others.append(other)
            if (response := await other) is not None:
                return response
        entry = self._entries[key] = _Entry()
        response = None
        try:
            response = await work()
        finally:
            self._settle(key, entry, response)
        return response

    def _settle(self, key: str, entry: _Entry, response: RpcResponse | None) -> None:
        for other in entry.others:
            if not other.done():
                other.set_result(response)
        entry.others.clear()
        if response is None or not response.final:
            del self._entries[key]
            return
        entry.response, entry.kept_at = response, self._clock()
        self._kept.append((key, entry))
        self._size += len(response.body) + OVERHEAD
        while self._kept and (self._size > self._most or self._kept[0][1].kept_at < entry.kept_at - self._kept_s):
            oldest, dropped = self._kept.popleft()
            assert dropped.response is not None
            self._size -= len(dropped.response.body) + OVERHEAD
            del self._entries[oldest]
