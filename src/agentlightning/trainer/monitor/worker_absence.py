"""WorkerAbsence: says that rollouts wait for workers and none comes, where workers are started elsewhere.

Driven by the processes of a run as a task of its own. It reads what the store knows of workers and rollouts; why nobody
comes it cannot see: a worker without the labels that the run asks for is refused, and says so where it was started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from agentlightning.errors import StoreError
from agentlightning.store.base import LightningStore

ABSENCE_S = 60.0
"""Workers ask for work, or beat, three times as often at least."""


class WorkerAbsence:
    """The workers of one run; `tell` gets a sentence each time that they have been absent for a while."""

    def __init__(
        self,
        store: LightningStore,
        run_id: str,
        labels: Sequence[str],
        tell: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._labels = labels
        self._tell = tell
        self._sleep = sleep
        self._seen_ns = 0
        self._told = False

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await self._sleep(ABSENCE_S)
            with contextlib.suppress(StoreError):  # a store that is away is told by whoever needs it
                await self._look()

    async def _look(self) -> None:
        # Compared with what the last look saw, not with a clock: the store's may be another machine's.
        before, self._seen_ns = (
            self._seen_ns,
            max((one.seen_ns for one in await self._store.workers(self._run_id)), default=0),
        )
        counts = await self._store.count(self._run_id)
        queued = sum(number for (_, state), number in counts.items() if state == "queued")
        absent = bool(queued) and self._seen_ns == before
        if absent and not self._told:
            asked = f" with {', '.join(self._labels)}" if self._labels else ""
            self._tell(f"{queued} rollouts wait, and no worker{asked} has asked for work for {ABSENCE_S:g} s")
        self._told = absent
