"""Coalescer: what many coroutines submit at the same time is delivered as one batch.

Driven by whoever pays per request: the store's client, the Redis writer, the gateway's reads of attempts. A batch begins
with the first item and takes in what is submitted in the same turn of the event loop; while it is under way the next one
gathers. So an item that comes alone waits for nothing. Where batches may overlap, one that hangs holds up the next for
`late_s` only. Knows nothing of what is delivered.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

MAX_OVERLAPPING = 4
"""Batches under way at a time, where they may overlap."""


class Coalescer(Generic[T, R]):
    """The items of one kind of request, in the order in which they were submitted. Use from one event loop.

    `deliver` gets a batch and returns an outcome per item; an exception among them, or one that it raises, is raised to the
    item's submitter, or to all. A batch holds at most `max_items` and, unless one item alone is larger, `max_size`. With
    `late_s`, one that has been under way for so many seconds no longer holds up the next.
    """

    def __init__(
        self,
        deliver: Callable[[list[T]], Awaitable[Sequence[R | Exception]]],
        *,
        max_items: int,
        max_size: int = 0,
        size: Callable[[T], int] | None = None,
        late_s: float | None = None,
    ) -> None:
        self._deliver = deliver
        self._max_items = max_items
        self._max_size = max_size
        self._size = size
        self._late_s = late_s
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._deliveries: set[asyncio.Task[None]] = set()
        self._next_by: asyncio.Task[None] | None = None
        """The delivery that takes the next batch; None while there is none that is not late."""

    async def submit(self, item: T) -> R:
        """Returns the item's outcome once its batch was delivered."""
        outcome: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, outcome))
        self._begin()
        return await outcome

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
            self._next_by = None if self._next_by in ending else self._next_by
        for _, outcome in self._waiting:
            _settle(outcome, _copied(reason))
        self._waiting.clear()

    def _begin(self) -> None:
        """Deliver what waits, unless a delivery is about to."""
        if self._waiting and self._next_by is None and len(self._deliveries) < MAX_OVERLAPPING:
            # In a context of its own: it delivers for everybody, and must not count as one submitter's task.
            delivery = self._deliver_all()
            self._next_by = asyncio.get_running_loop().create_task(delivery, context=contextvars.Context())
            self._deliveries.add(self._next_by)

    def _leave_behind(self) -> None:
        """The batch under way is late: another delivery takes what waits and what comes."""
        self._next_by = None
        self._begin()

    async def _deliver_all(self) -> None:
        this, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert this is not None
        try:
            while self._next_by in (this, None) and (batch := self._next()):
                self._next_by = this
                timer = None if self._late_s is None else loop.call_later(self._late_s, self._leave_behind)
                try:
                    outcomes = await self._deliver([item for item, _ in batch])
                except Exception as error:
                    outcomes = [_copied(error) for _ in batch]
                except asyncio.CancelledError:
                    self._waiting.extendleft(reversed(batch))  # `close` says why
                    raise
                finally:
                    if timer is not None:
                        timer.cancel()
                for (_, future), outcome in zip(batch, outcomes, strict=True):
                    _settle(future, outcome)
        finally:
            self._deliveries.discard(this)
            if self._next_by is this:
                self._next_by = None

    def _next(self) -> list[tuple[T, asyncio.Future[R]]]:
        batch: list[tuple[T, asyncio.Future[R]]] = []
        size = 0
        while self._waiting and len(batch) < self._max_items:
            item, outcome = self._waiting[0]
            if outcome.cancelled():  # its submitter gave up in time
                self._waiting.popleft()
                continue
            if self._size is not None:
                size += self._size(item)
                if batch and self._max_size and size > self._max_size:
                    break
            batch.append(self._waiting.popleft())
        return batch


def _copied(error: Exception) -> Exception:
    """The error for one of several: each raises it with a traceback of its own, if its class can be copied."""
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
