"""Deadline: a time limit on the work of one task, for every call.

Driven by whatever waits for somebody else: a client, an engine, an external model. asyncio.timeout does the same in twice
the time, and raises where its end is moved in the very tick in which it is reached.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Deadline:
    """A context manager: what is in it gets TimeoutError after so many seconds, or at the time to which the end is moved."""

    __slots__ = ("_cancelling", "_expired", "_loop", "_task", "_timer", "when")

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._expired = False
        self.when = self._loop.time() + seconds
        """On the clock of the event loop."""

    def __enter__(self) -> Self:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._timer = self._loop.call_at(self.when, self._expire)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        task, self._task = self._task, None
        self._timer.cancel()
        # A task that was cancelled by somebody else as well is to end.
        others = self._expired and task is not None and task.uncancel() > self._cancelling
        if self._expired and kind is asyncio.CancelledError and not others:
            raise TimeoutError from error

    def shorten(self, seconds: float) -> None:
        """End in so many seconds, unless the end is nearer; does nothing where it was reached or the work is done."""
        when = min(self.when, self._loop.time() + seconds)
        if self._task is not None and not self._expired:
            self._timer.cancel()
            self.when = when
            self._timer = self._loop.call_at(when, self._expire)

    def _expire(self) -> None:
        if self._task is not None:
            self._expired = True
            self._task.cancel()
