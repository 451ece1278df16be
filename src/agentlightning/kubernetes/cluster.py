"""Cluster: what the Kubernetes runner needs of an API server, in one namespace, and FollowedObjects, which keeps all objects
of one kind up to date by list and watch. Objects are what the API's JSON says.

`LightkubeCluster` is the real one; tests have one in memory, which passes the same suite. Decides nothing: what objects mean
is known to those who drive it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Literal, Protocol

from agentlightning.errors import AgentLightningError
from agentlightning.records import JSON
from agentlightning.runtime.backoff import Backoff

log = logging.getLogger(__name__)

Kind = Literal["Job", "Pod", "Secret", "Event"]

RESYNC_S = 30.0
"""Everything is listed anew so often: a watch that hangs, or that lost something, costs no more than that."""


class ClusterError(AgentLightningError):
    """The API server refused a request, or did not answer it."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """status: of its answer; None where there was none."""
        super().__init__(message)
        self.status = status


class Cluster(Protocol):
    """One namespace of a cluster. Every method may raise ClusterError."""

    async def create(self, manifest: JSON, *, dry_run: bool = False) -> JSON:
        """Create a Job or a Secret, or only check that it could be; 409 where there is one of this name. Returns it."""
        ...

    async def read(self, kind: Kind, name: str) -> JSON:
        """The object; 404 where there is none."""
        ...

    async def list(
        self, kind: Kind, labels: Mapping[str, str], fields: Mapping[str, str] | None = None
    ) -> Sequence[JSON]:
        """Objects with all of these labels and fields."""
        ...

    def follow(self, kind: Kind, labels: Mapping[str, str]) -> AsyncGenerator[tuple[str, JSON], None]:
        """Yields ("ADDED", object) for all that are there, ("LISTED", {}) after the last of them, and then each change
        ("ADDED", "MODIFIED", "DELETED") as it comes. Its connection is open until it is closed."""
        ...

    async def delete_job(self, name: str) -> None:
        """Delete a Job and, in the background, all that it owns; 404 where there is none."""
        ...

    async def log(self, pod: str, container: str, lines: int) -> str:
        """The last lines that a container printed on both streams; 400 or 404 where it never started or is gone."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


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
