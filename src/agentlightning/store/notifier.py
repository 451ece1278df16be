"""Notifier: how a commit wakes the coroutines that wait for what it brought, so that nobody polls.

Driven by the stores: a writer notifies after its commit (and a listener for other processes), methods that wait subscribe. A
notification promises nothing: who is woken looks again. Knows only topics and numbers.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

Topic = tuple[str, str]
"""One of these, and a run."""
QUEUED = "queued"
FINISHED = "finished"
RESOURCES = "resources"
METRICS = "metrics"
ALIASES = "aliases"
"""Rollouts of the run are queued; the number of it that have finished; a resource has a new version; there are metrics. Of a
model's name in the place of the run: an alias was moved."""


class Notifier:
    """Listeners of any event loop, woken from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: dict[Topic, set[_Subscription]] = defaultdict(set)

    @contextmanager
    def subscribe(self, topic: Topic, goal: int = 0) -> Iterator[_Subscription]:
        """Subscribes to notifications of `topic` with at least the value `goal`.

        Enter before looking at the data: what is committed between the look and the wait then ends the wait.
        """
        subscription = _Subscription(goal)
        with self._lock:
            self._subscriptions[topic].add(subscription)
        try:
            yield subscription
        finally:
            with self._lock:
                self._subscriptions[topic].discard(subscription)
                if not self._subscriptions[topic]:
                    del self._subscriptions[topic]

    def notify(self, values: Mapping[Topic, int]) -> None:
        """Wake the subscriptions of these topics whose goal is reached."""
        with self._lock:
            woken = [
                subscription
                for topic, value in values.items()
                for subscription in self._subscriptions.get(topic, ())
                if subscription.goal <= value
            ]
        for subscription in woken:
            subscription.wake()

    def notify_all(self) -> None:
        """Wake every subscription, whatever it waits for: a notification may have been missed."""
        with self._lock:
            woken = [subscription for subscriptions in self._subscriptions.values() for subscription in subscriptions]
        for subscription in woken:
            subscription.wake()


class _Subscription:
    def __init__(self, goal: int) -> None:
        self.goal = goal
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        with suppress(RuntimeError):  # its loop has closed, perhaps this very moment: nobody waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> None:
        """Return when notified since the last wait, or after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()
