"""LeaseExpiry: gives up attempts whose leases have run out, once everybody had the chance to renew them.

Driven by the app as a background task. A worker renews through a server and its store: while either was away, or this
machine stood still, nobody could, and a lease that ran out meanwhile says nothing of its worker. After a start, and after
each such gap, no lease is given up for the time of a whole one. Of several servers over a store each knows its own gaps:
workers that reach the store through another one, which alone was away, are told from dead ones by nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agentlightning.errors import StoreError
from agentlightning.runtime.clock import elapsed_s
from agentlightning.store.base import LEASE_S, LightningStore

log = logging.getLogger(__name__)

EXPIRY_S = 1.0
"""Seconds between two searches for expired leases."""

MAX_GAP = 1 / 6
"""Share of a lease for which searches may be late: workers beat three times a lease, so that less costs nobody two beats."""


class LeaseExpiry:
    """`lease_s`: for how long expired leases are left alone after a gap; `on_expired` is called where some were not."""

    def __init__(
        self,
        store: LightningStore,
        on_expired: Callable[[], None],
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = elapsed_s,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._on_expired = on_expired
        self._lease_s = lease_s
        self._clock = clock
        self._sleep = sleep

    async def run(self) -> None:
        """Search until cancelled."""
        pause_s = min(EXPIRY_S, self._lease_s / 4)
        since = looked = self._clock()
        while True:
            present = await self._present()
            now = self._clock()
            if not present or now - looked > pause_s + self._lease_s * MAX_GAP:
                if now - since >= self._lease_s:
                    log.warning("leases could not be renewed for a while: none is given up for %g s", self._lease_s)
                since = now
            elif now - since >= self._lease_s:
                await self._expire()
            looked = now
            await self._sleep(pause_s)

    async def _present(self) -> bool:
        """Asks the store for next to nothing just before a search, which might else wait for it, then find all expired."""
        try:
            await self._store.runs(limit=1)
        except StoreError as cause:
            log.warning("leases were not checked: %s", cause)
            return False
        return True

    async def _expire(self) -> None:
        try:
            if await self._store.expire_leases(within_s=self._lease_s * MAX_GAP):
                self._on_expired()
        except StoreError as cause:
            log.warning("leases were not checked: %s", cause)
