"""Bells: how a commit wakes the coroutines that wait for what it brought, so that nobody polls.

Driven by the SQL store: its writer thread rings (and on PostgreSQL its listener, for other processes), verbs that wait
listen. Who is woken looks again: a ring promises nothing. Knows only topics and numbers.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

Topic = tuple[str, str]
"""What about (``queued``, ``finished``) and the run."""


class Bell:
    """Listeners of any event loop, woken from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[Topic, set[_Listener]] = defaultdict(set)

    @contextmanager
    def listening(self, topic: Topic, goal: int = 0) -> Iterator[_Listener]:
        """A listener that hears rings of `topic` with at least the value `goal`.

        Enter before looking at the data: what is committed between the look and the wait is then heard.
        """
        listener = _Listener(goal)
        with self._lock:
            self._listeners[topic].add(listener)
        try:
            yield listener
        finally:
            with self._lock:
                self._listeners[topic].discard(listener)
                if not self._listeners[topic]:
                    del self._listeners[topic]

    def ring(self, news: Mapping[Topic, int]) -> None:
        """Wake the listeners of these topics whose goal is reached."""
        with self._lock:
            woken = [
                listener
                for topic, value in news.items()
                for listener in self._listeners.get(topic, ())
                if listener.goal <= value
            ]
        for listener in woken:
            listener.wake()

    def ring_all(self) -> None:
        """Wake every listener, whatever it waits for: something may have happened unheard."""
        with self._lock:
            woken = [listener for listeners in self._listeners.values() for listener in listeners]
        for listener in woken:
            listener.wake()


class _Listener:
    def __init__(self, goal: int) -> None:
        self.goal = goal
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        with suppress(RuntimeError):  # its loop has closed, perhaps this very moment: nobody waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> None:
        """Return when rung since the last wait, or after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()
