"""Pauses: calls wait while a policy's weights are exchanged, for engines that cannot do it under calls in flight.

A pause is a resource of the run with a lease: gateways watch it as they watch policies, and a trainer that dies cannot stop
the agents for ever. Calls wait, none is refused. Driven by the trainer's side (`pause`, `resume`) and by
policy/engine_router.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.records import Resource
from agentlightning.store.base import LightningStore

LOOK_S = 0.5
WATCHED_LOOK_S = 5.0
"""Seconds between two reads of the store while a call is paused: another server may have been told to resume. Where the
store reports changes, a read is for the case that it stops doing so."""


async def pause(store: LightningStore, run_id: str, alias: str = "default", lease_s: float = 60.0) -> None:
    """New calls of the policy wait, until `resume` or for `lease_s` seconds; pausing again extends the lease."""
    await _put(store, run_id, alias, time.time_ns() + int(lease_s * 1e9))


async def resume(store: LightningStore, run_id: str, alias: str = "default") -> None:
    """The calls that waited go on."""
    await _put(store, run_id, alias, 0)


def paused_s(resources: Sequence[Resource], alias: str) -> float:
    """Seconds that new calls of the policy have to wait, if nobody resumes it; 0 or less where it is not paused."""
    for one in resources:
        if one.kind == "pause" and one.name == f"pause:{alias}":
            return (int(one.value.get("until_ns", 0)) - time.time_ns()) / 1e9
    return 0.0


async def resumed(watcher: ResourceWatcher, run_id: str, alias: str) -> None:
    """Returns when the policy is not paused any more. Raises StoreError."""
    while (left_s := paused_s(await watcher.resources(run_id), alias)) > 0:
        look_s = WATCHED_LOOK_S if watcher.reports_changes(run_id) else LOOK_S
        await watcher.wait_change(run_id, min(left_s, look_s))


async def _put(store: LightningStore, run_id: str, alias: str, until_ns: int) -> None:
    # Named apart from the policy: versions are counted by name, and a policy's must stay its own.
    resource = Resource(run_id=run_id, name=f"pause:{alias}", kind="pause", value={"until_ns": until_ns})
    await store.put_resources([resource])
