"""ResourceWatcher: the newest resources of the runs in use, read once and again only when the store says that they changed.

Driven by whoever derives something from resources (policy/engine_router.py, external_client.py), for every call. One long
poll for each run that is in use; nothing is asked for runs that are not. Knows no kind of resource.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.records import Resource
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.base import LightningStore

log = logging.getLogger(__name__)

POLL_S = 30.0
IDLE_TIMEOUT_S = 600.0
"""A run that was not used for so long is watched no longer."""
MAX_AGE_S = 0.5
"""Interval at which resources are read again if the store does not tell of changes: another server may put some, and a
canary is rolled back everywhere within a second."""
PAUSE_S = 1.0
"""Pause after a failed request to the store, in seconds."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A run in use."""

    used_s: float
    reports_changes: bool = False
    """The store answered, and is being asked for what is newer."""
    versions: dict[str, int] = field(default_factory=dict)
    poll: asyncio.Task[None] | None = None
    reading: asyncio.Task[list[Resource]] | None = None
    """The read whose result is or becomes the newest; a crowd of calls shares one."""
    read_s: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class ResourceWatcher:
    """The resources of all runs in use. `on_change` is told of a run whose resources are, or may be, others now."""

    def __init__(self, store: LightningStore, on_change: Callable[[str], None], background: BackgroundTasks) -> None:
        self._store = store
        self._background = background
        self._on_change = on_change
        self._watched: dict[str, _Watched] = {}

    async def resources(self, run_id: str) -> list[Resource]:
        """The newest resources of a run, the same list until they change. Raises StoreError."""
        now = time.monotonic()
        watched = self._watched.get(run_id)
        if watched is None:
            watched = self._watched[run_id] = one = _Watched(now)
            watched.poll = self._background.start("resource watcher", lambda: self._poll(run_id, one))
        watched.used_s = now
        reading = watched.reading
        if reading is not None and reading.done():
            failed = reading.cancelled() or reading.exception() is not None
            if not failed and (watched.reports_changes or now - watched.read_s < MAX_AGE_S):
                return reading.result()
            reading = None
        if reading is None:
            reading = watched.reading = asyncio.ensure_future(self._store.resources(run_id))
            watched.read_s = now
        found = await asyncio.shield(reading)
        # What was forgotten while it was read is old, and nobody would wake a caller that waits for its next change.
        return found if watched.reading is reading else await self.resources(run_id)

    def forget(self, run_id: str) -> None:
        """The resources of this run changed: a read that began before does not count."""
        watched = self._watched.get(run_id)
        if watched is not None:
            watched.reading = None
            watched.changed.set()
            watched.changed = asyncio.Event()
        self._on_change(run_id)

    def reports_changes(self, run_id: str) -> bool:
        """True where the store would have reported resources newer than those read last."""
        watched = self._watched.get(run_id)
        return watched is not None and watched.reports_changes

    async def wait_change(self, run_id: str, timeout_s: float) -> None:
        """Returns when the resources of a run in use changed; they are read again after the timeout."""
        watched = self._watched.get(run_id)
        try:
            if watched is not None:
                await asyncio.wait_for(watched.changed.wait(), timeout_s)
        except TimeoutError:
            self.forget(run_id)

    async def close(self) -> None:
        """Ask no more."""
        polls = [watched.poll for watched in self._watched.values() if watched.poll is not None]
        self._watched.clear()
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)

    async def _poll(self, run_id: str, watched: _Watched) -> None:
        while time.monotonic() - watched.used_s < IDLE_TIMEOUT_S:
            try:
                found = await self._store.wait_resources(run_id, watched.versions, POLL_S)
            except NotFoundError:
                break
            except StoreError as cause:
                watched.reports_changes = False
                log.warning("changes of run %s are not reported: %s", run_id, cause)
                await asyncio.sleep(PAUSE_S)
                continue
            except Exception:
                watched.reports_changes = False
                raise
            watched.versions |= {one.name: one.version for one in found}
            watched.reports_changes = True
            if found:
                self.forget(run_id)
        self._watched.pop(run_id, None)
        self._on_change(run_id)
