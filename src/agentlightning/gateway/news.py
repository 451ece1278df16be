"""News: which runs got new resources, as the store tells it, so that a gateway never reads again what did not change.

Driven by whoever remembers resources (upstreams.py, directory.py): `follow` a run when it is used, and what is remembered of
it holds while `is_followed`. One long poll for each run that is in use; nothing is asked for runs that are not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.store.base import LightningStore

log = logging.getLogger(__name__)

POLL_S = 30.0
IDLE_S = 600.0
"""A run that was not used for so long is not followed any more."""
PAUSE_S = 1.0
"""After a store that could not be asked."""


@dataclass(slots=True)
class _Following:
    used_s: float
    told: bool = False
    """The store answered, and is being asked for what is newer."""
    versions: dict[str, int] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class News:
    """The runs that are followed."""

    def __init__(self, store: LightningStore, on_news: Callable[[str], None]) -> None:
        self._store = store
        self._on_news = on_news
        self._followed: dict[str, _Following] = {}

    def follow(self, run_id: str) -> None:
        """The run is in use: `on_news` hears of its resources from now on, until it was idle for a while."""
        following = self._followed.get(run_id)
        if following is None:
            following = self._followed[run_id] = _Following(time.monotonic())
            following.task = asyncio.create_task(self._ask(run_id, following))
        following.used_s = time.monotonic()

    def is_followed(self, run_id: str) -> bool:
        """Whether the store would have told if the run had other resources than when they were read last."""
        following = self._followed.get(run_id)
        return following is not None and following.told

    async def close(self) -> None:
        """Ask no more."""
        tasks = [following.task for following in self._followed.values() if following.task is not None]
        self._followed.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, run_id: str, following: _Following) -> None:
        try:
            while time.monotonic() - following.used_s < IDLE_S:
                try:
                    found = await self._store.wait_resources(run_id, following.versions, POLL_S)
                except NotFoundError:
                    return
                except StoreError as cause:
                    following.told = False
                    log.warning("news of run %s cannot be had: %s", run_id, cause)
                    await asyncio.sleep(PAUSE_S)
                    continue
                following.versions |= {one.name: one.version for one in found}
                following.told = True
                if found:
                    self._on_news(run_id)
        finally:
            self._followed.pop(run_id, None)
            self._on_news(run_id)
