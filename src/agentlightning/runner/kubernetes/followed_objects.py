"""FollowedObjects: all of one kind in a cluster, kept up to date by list and watch. Knows nothing of what they mean."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing

from agentlightning.records import JSON
from agentlightning.runner.kubernetes.cluster import Cluster, ClusterError, Kind
from agentlightning.runtime.backoff import Backoff

log = logging.getLogger(__name__)

RESYNC_S = 30.0
"""Everything is listed anew so often: a watch that hangs, or that lost something, costs no more than that."""


class FollowedObjects:
    """Objects of one kind with some labels. `run` goes on until it is cancelled, whatever the API server does."""

    def __init__(
        self,
        cluster: Cluster,
        kind: Kind,
        labels: Mapping[str, str],
        changed: Callable[[], None],
        resync_s: float = RESYNC_S,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._labels = labels
        self._changed = changed
        self._resync_s = resync_s
        self.objects: dict[str, JSON] = {}
        """By name."""
        self.live = False
        """False while the API server is away: what is in `objects` may be old."""
        self.listed = float("-inf")
        """time.monotonic() from which on all that was there is known."""

    async def run(self) -> None:
        """Keep `objects` up to date."""
        backoff = Backoff()
        while True:
            try:
                async with asyncio.timeout(self._resync_s):
                    await self._once(backoff)
            except TimeoutError:
                continue
            except ClusterError as error:
                if self.live:
                    log.warning("%ss are not watched: %s", self._kind, error)
                self.live = False
                await backoff.sleep()

    async def _once(self, backoff: Backoff) -> None:
        began = time.monotonic()
        listed: dict[str, JSON] | None = {}
        async with aclosing(self._cluster.follow(self._kind, self._labels)) as changes:
            async for change, found in changes:
                if change == "LISTED":
                    self.objects, listed = listed or {}, None
                    self.live, self.listed = True, began
                    backoff.reset()
                elif listed is not None:
                    listed[found["metadata"]["name"]] = found
                    continue
                elif change == "DELETED":
                    self.objects.pop(found["metadata"]["name"], None)
                else:
                    self.objects[found["metadata"]["name"]] = found
                self._changed()
        raise ClusterError("Kubernetes: the watch ended")
