"""Coalescer: what many coroutines submit at the same time is delivered as one batch.

Driven by whoever pays per request: the store's client, the Redis writer, the gateway's reads of attempts. A batch begins
with the first item and takes in what is submitted in the same turn of the event loop; while it is under way the next one
gathers. So an item that comes alone waits for nothing. Knows nothing of what is delivered.
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


class Coalescer(Generic[T, R]):
    """The items of one kind of request, in the order in which they were submitted. Use from one event loop.

    `deliver` gets a batch and returns an outcome per item; an exception among them, or one that it raises, is raised to the
    item's submitter, or to all. A batch holds at most `max_items` and, unless one item alone is larger, `max_size`.
    """

    def __init__(
        self,
        deliver: Callable[[list[T]], Awaitable[Sequence[R | Exception]]],
        *,
        max_items: int,
        max_size: int = 0,
        size: Callable[[T], int] = lambda _: 0,
    ) -> None:
        self._deliver = deliver
        self._max_items = max_items
        self._max_size = max_size
        self._size = size
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._delivery: asyncio.Task[None] | None = None

    async def submit(self, item: T) -> R:
        """Returns the item's outcome once its batch was delivered."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, outcome))
        if self._delivery is None:
            # In a context of its own: it delivers for everybody, and must not count as one submitter's task.
            self._delivery = loop.create_task(self._deliver_all(), context=contextvars.Context())
        return await outcome

    async def drain(self) -> None:
        """Returns once everything that was submitted is delivered."""
        while self._delivery is not None:
            await asyncio.wait({self._delivery})

    async def close(self, reason: Exception) -> None:
        """Ends the delivery under way; what was not delivered, or comes meanwhile, fails with `reason`."""
        while (delivery := self._delivery) is not None:
            delivery.cancel()
            await asyncio.wait({delivery})
            if self._delivery is delivery:  # one that had not yet begun never ends by itself
                self._delivery = None
        for _, outcome in self._waiting:
            _settle(outcome, _copied(reason))
        self._waiting.clear()

    async def _deliver_all(self) -> None:
        try:
            while batch := self._next():
                try:
                    outcomes = await self._deliver([item for item, _ in batch])
                except Exception as error:
                    outcomes = [_copied(error) for _ in batch]
                except asyncio.CancelledError:
                    self._waiting.extendleft(reversed(batch))  # `close` says why
                    raise
                for (_, future), outcome in zip(batch, outcomes, strict=True):
                    _settle(future, outcome)
        finally:
            self._delivery = None

    def _next(self) -> list[tuple[T, asyncio.Future[R]]]:
        batch: list[tuple[T, asyncio.Future[R]]] = []
        size = 0
        while self._waiting and len(batch) < self._max_items:
            item, outcome = self._waiting[0]
            if outcome.cancelled():  # its submitter gave up in time
                self._waiting.popleft()
                continue
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
