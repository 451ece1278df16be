"""Batches: what coroutines append at the same time travels as one request.

Driven by LightningStoreClient. A batch begins with the first append and takes in whatever is appended in the same turn of
the event loop; while it is under way the next one gathers. So an append that comes alone waits for nothing, and the more
come at once the fewer requests they are. A server executes a request as a whole; where it refuses one, its halves are sent
on their own, until only those that are at fault fail. Knows neither verbs nor HTTP.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agentlightning.errors import AgentLightningError, ConfigError, StoreError

LARGEST = 4 * 1024 * 1024
"""Bytes of a batch, beyond which appends wait for the next one; a single append may be larger."""

Send = Callable[[bytes, int], Awaitable[Sequence[bool] | None]]
"""Sends a JSON list, and its length, as one request; returns what the server said of each element, or nothing."""


@dataclass(slots=True, eq=False)
class _Append:
    elements: bytes
    """As JSON, without the brackets."""
    count: int
    future: asyncio.Future[Sequence[bool] | None]


class Batches:
    """The appends of one verb. Use from one event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: deque[_Append] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def append(self, elements: bytes, count: int) -> Sequence[bool] | None:
        """Send `count` elements, a JSON list; what the server said of them. Raises what the server raised."""
        loop = asyncio.get_running_loop()
        append = _Append(elements[1:-1], count, loop.create_future())
        self._waiting.append(append)
        if self._sending is None:
            self._sending = loop.create_task(self._send_all())
        return await append.future

    async def close(self) -> None:
        """Fail what is under way."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.cancel()
            await asyncio.wait({sending})

    async def _send_all(self) -> None:
        batch: list[_Append] = []
        try:
            while self._waiting:
                batch = self._next()
                await self._deliver(batch)
        finally:  # only a cancellation leaves any
            self._sending = None
            _fail([*batch, *self._waiting], StoreError("the store was closed while this was being sent"))
            self._waiting.clear()

    def _next(self) -> list[_Append]:
        batch: list[_Append] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0].elements) <= LARGEST):
            append = self._waiting.popleft()
            if not append.future.cancelled():
                batch.append(append)
                size += len(append.elements)
        return batch

    async def _deliver(self, batch: list[_Append]) -> None:
        if not batch:
            return
        body = b"[" + b",".join(append.elements for append in batch) + b"]"
        try:
            said = await self._send(body, sum(append.count for append in batch))
        except AgentLightningError as error:
            if len(batch) == 1 or type(error) in (StoreError, ConfigError):  # nobody's in particular
                _fail(batch, error)
                return
            middle = len(batch) // 2
            await self._deliver(batch[:middle])
            await self._deliver(batch[middle:])
            return
        except Exception as error:
            _fail(batch, error)
            return
        start = 0
        for append in batch:
            part = None if said is None else said[start : start + append.count]
            start += append.count
            if not append.future.done():
                append.future.set_result(part)


def _fail(batch: Sequence[_Append], error: Exception) -> None:
    for append in batch:
        if not append.future.done():
            append.future.set_exception(copy.copy(error))
