"""BackgroundTasks: loops that go on as long as their owner does, and are started again where they fail.

Every long-lived loop of a server or a worker is one of these. A failure is logged with its traceback and counted, and the
loop is down until it is started again, which takes longer each time. Knows nothing of what the loops do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from agentlightning.runtime.backoff import Backoff

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 30.0


class BackgroundTasks:
    """Loops by name; several may have the same. `failed` and `running` may be called from any thread."""

    def __init__(self, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.failures: Counter[str] = Counter()
        """Failures by name of loop."""
        self._first_pause_s = first_pause_s
        self._down: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def down(self) -> list[str]:
        """Names of loops that failed and were not started again yet."""
        with self._counting:
            return sorted(+self._down)

    def start(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `work` in a task of its own, until it returns, or the task is cancelled."""
        task = asyncio.create_task(self.run(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` until it returns; where it raises, start it again after a pause."""
        backoff = Backoff(first_s=self._first_pause_s, max_s=MAX_PAUSE_S)
        while True:
            began = time.monotonic()
            try:
                await work()
                return
            except Exception as error:
                self.failed(name, error)
            if time.monotonic() - began > MAX_PAUSE_S:  # it had worked: this failure is a first one
                backoff.reset()
            try:
                await backoff.sleep()
            finally:
                self.running(name)

    def failed(self, name: str, error: Exception) -> None:
        """A loop has failed; whoever says so starts it again, and says `running` then."""
        log.error("%s failed, and is started again", name, exc_info=error)
        with self._counting:
            self.failures[name] += 1
            self._down[name] += 1

    def running(self, name: str) -> None:
        """A loop that failed runs again, or is not wanted any more."""
        with self._counting:
            self._down[name] -= 1

    async def stop(self) -> None:
        """End the loops that were started here."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
