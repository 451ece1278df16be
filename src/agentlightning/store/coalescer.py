"""Coalescer: what many coroutines submit at the same time is delivered as one batch.

Driven by whoever pays per request: the store's client, the Redis writer, a worker's reads and deliveries. A batch begins
with the first item and takes in whatever is submitted in the same turn of the event loop; while it is under way the next one
gathers. So an item that comes alone waits for nothing, and the more come at once the fewer batches they are. Where batches
may overlap, one that hangs holds up others for `late_s` only. Knows nothing of what is delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

MAX_OVERLAPPING = 4
"""Most batches under way at a time."""


class Coalescer(Generic[T, R]):
    """The items of one kind of request, in the order in which they were submitted. Use from one event loop.

    `deliver` gets a batch and returns an outcome per item; an exception among them, or one that it raises, is raised to the
    item's submitter, or to all. A batch holds at most `max_items` and, unless one item alone is larger, `max_size`. With
    `late_s`, a batch that has been under way for so many seconds no longer holds up the next one.
    """

    def __init__(
        self,
        deliver: Callable[[list[T]], Awaitable[Sequence[R | Exception]]],
        *,
        max_items: int,
        max_size: int = 0,
        size: Callable[[T], int] = lambda _: 0,
        late_s: float | None = None,
    ) -> None:
        self._deliver = deliver
        self._max_items = max_items
        self._max_size = max_size
        self._size = size
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._late_s = late_s
        self._late = 0
        """Batches under way that are late."""
        self._deliveries: set[asyncio.Task[None]] = set()

    async def submit(self, item: T) -> R:
        """Returns the item's outcome once its batch was delivered."""
        outcome: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, outcome))
        self._begin()
        return await outcome

    @property
    def idle(self) -> bool:
        """True where nothing waits or is being delivered."""
        return not self._deliveries

    async def drain(self) -> None:
        """Returns once everything that was submitted is delivered."""
        while self._deliveries:
            await asyncio.wait(set(self._deliveries))

    async def close(self, reason: Exception) -> None:
        """Ends the deliveries under way; what was not delivered, or comes meanwhile, fails with `reason`."""
        while ending := set(self._deliveries):  # again for what was submitted while these ended
            for delivery in ending:
                delivery.cancel()
            await asyncio.wait(ending)
            self._deliveries -= ending  # one that had not yet begun never ends by itself
        for _, outcome in self._waiting:
            _settle(outcome, _copied(reason))
        self._waiting.clear()

    def _begin(self) -> None:
        """Deliver what waits, unless somebody does who is not late."""
        if self._waiting and len(self._deliveries) == self._late < MAX_OVERLAPPING:
            # In a context of its own: it delivers for everybody, and must not count as one submitter's task.
            delivery = self._deliver_all()
            self._deliveries.add(asyncio.get_running_loop().create_task(delivery, context=contextvars.Context()))

    async def _deliver_all(self) -> None:
        this = asyncio.current_task()
        assert this is not None
        try:
            while batch := self._next():
                with self._timed():
                    await self._deliver_batch(batch)
        finally:
            self._deliveries.discard(this)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Around a delivery: once it is late, the next begins."""
        late = False

        def on_late() -> None:
            nonlocal late
            late = True
            self._late += 1
            self._begin()

        timer = None if self._late_s is None else asyncio.get_running_loop().call_later(self._late_s, on_late)
        try:
            yield
        finally:
            self._late -= late
            if timer is not None:
                timer.cancel()

    async def _deliver_batch(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            outcomes = await self._deliver([item for item, _ in batch])
        except Exception as error:
            outcomes = [_copied(error) for _ in batch]
        except asyncio.CancelledError:
            self._waiting.extendleft(reversed(batch))  # `close` says why
            raise
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            _settle(future, outcome)

    def _next(self) -> list[tuple[T, asyncio.Future[R]]]:
        batch: list[tuple[T, asyncio.Future[R]]] = []
        size = 0
        while self._waiting and len(batch) < self._max_items:
            item, outcome = self._waiting[0]
            size += self._size(item)
            if batch and self._max_size and size > self._max_size:
                break
            self._waiting.popleft()
            if outcome.cancelled():  # its submitter gave up in time
                size -= self._size(item)
            else:
                batch.append((item, outcome))
        return batch


def _copied(error: Exception) -> Exception:
    """The error for one of several: each raises it with a traceback of its own, where its class can be copied."""
    try:
        return copy.copy(error)
    except Exception:
        return error


def _settle(future: asyncio.Future[R], outcome: R | Exception) -> None:
    if future.done():  # its submitter gave up
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
