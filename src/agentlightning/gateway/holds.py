"""Holds: calls wait while a policy's weights are exchanged, for engines that cannot do it under calls in flight.

A hold is a resource of the run with a lease: gateways follow it as they follow policies, and a trainer that dies cannot stop
the agents for ever. Calls are held, never refused. Driven by the trainer's side (`hold`, `release`) and by upstreams.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from agentlightning.gateway.news import News
from agentlightning.store.base import LightningStore
from agentlightning.types import Resource

LOOK_S = 0.5
FOLLOWED_LOOK_S = 5.0
"""Seconds between two looks at the store while a call is held: another server may have been told of the release. Where news
of the run come by themselves, a look is for the case that they end."""


async def hold(store: LightningStore, run_id: str, alias: str = "default", lease_s: float = 60.0) -> None:
    """New calls of the policy wait, until `release` or for `lease_s` seconds; holding again extends the lease."""
    await _put(store, run_id, alias, time.time_ns() + int(lease_s * 1e9))


async def release(store: LightningStore, run_id: str, alias: str = "default") -> None:
    """The calls that waited go on."""
    await _put(store, run_id, alias, 0)


class Holds:
    """The holds of all runs, as this server knows them."""

    def __init__(self, store: LightningStore, news: News) -> None:
        self._store = store
        self._news = news
        self._until_ns: dict[str, dict[str, int]] = {}
        self._changed: dict[str, asyncio.Event] = {}

    def learn(self, run_id: str, resources: Sequence[Resource]) -> None:
        """The newest resources of a run, as read from the store."""
        now_ns = time.time_ns()
        found = {one.name: int(one.value.get("until_ns", 0)) for one in resources if one.kind == "hold"}
        live = {name.removeprefix("hold:"): until_ns for name, until_ns in found.items() if until_ns > now_ns}
        if live:
            self._until_ns[run_id] = live
        else:
            self._until_ns.pop(run_id, None)
        changed = self._changed.pop(run_id, None)
        if changed is not None:
            changed.set()

    def is_held(self, run_id: str, alias: str) -> bool:
        """Whether new calls of the policy must wait."""
        held = self._until_ns.get(run_id)
        return held is not None and held.get(alias, 0) > time.time_ns()

    def any(self, run_id: str) -> bool:
        """Whether some policy of the run is held, as far as is known."""
        return run_id in self._until_ns

    async def released(self, run_id: str, alias: str) -> None:
        """Returns when the policy is not held any more. Raises StoreError."""
        while self.is_held(run_id, alias):
            left_s = (self._until_ns[run_id][alias] - time.time_ns()) / 1e9
            changed = self._changed.setdefault(run_id, asyncio.Event())
            look_s = FOLLOWED_LOOK_S if self._news.is_followed(run_id) else LOOK_S
            try:
                await asyncio.wait_for(changed.wait(), max(0.0, min(left_s, look_s)))
            except TimeoutError:
                self.learn(run_id, await self._store.resources(run_id))


async def _put(store: LightningStore, run_id: str, alias: str, until_ns: int) -> None:
    # Named apart from the policy: versions are counted by name, and a policy's must stay its own.
    resource = Resource(run_id=run_id, name=f"hold:{alias}", kind="hold", value={"until_ns": until_ns})
    await store.put_resources([resource])
