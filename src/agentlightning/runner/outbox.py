"""Outbox: what attempts of this worker have recorded on the way to the store, many attempts' spans in one request.

The worker drives it every few seconds and at the end of each attempt. Knows nothing of how spans are made.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Sequence

from agentlightning.errors import AgentLightningError, ConflictError, NotFoundError, StoreError
from agentlightning.store.base import LightningStore
from agentlightning.types import Span

DELIVER_S = 2.0
"""Between deliveries while an attempt runs: what a killed worker loses at most."""
MOST_SPANS_A_REQUEST = 500
LONGEST_PAUSE_S = 2.0


class Outbox:
    """Delivers spans. give_up_s: how long it tries while the store is away; as long as leases last without it."""

    def __init__(self, store: LightningStore, give_up_s: float) -> None:
        self._store = store
        self._give_up_s = give_up_s
        self._waiting: list[tuple[Sequence[Span], asyncio.Future[int]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def deliver(self, spans: Sequence[Span]) -> int:
        """Returns once they, and all that was given before, are in the store or given up: how many of these were.

        Spans are never worth an attempt's end.
        """
        if not spans and (self._sending is None or self._sending.done()):
            return 0
        lost: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((spans, lost))
        if self._sending is None or self._sending.done():
            # In a context of its own: it sends for every attempt, and must not count as a task of one of them.
            self._sending = asyncio.create_task(self._send_all(), context=contextvars.Context())
        return await lost

    async def _send_all(self) -> None:
        """What comes while a request is under way goes into the next one."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._send_batch(batch)
            finally:
                for spans, lost in batch:  # nobody waits for ever, whatever goes wrong here
                    _tell(lost, len(spans))

    async def _send_batch(self, batch: Sequence[tuple[Sequence[Span], asyncio.Future[int]]]) -> None:
        together = [span for spans, _ in batch for span in spans]
        if len(together) <= MOST_SPANS_A_REQUEST and await self._send(together):
            for _, lost in batch:
                _tell(lost, 0)
            return
        for spans, lost in batch:  # one attempt's may be what the store refuses
            count = 0
            for start in range(0, len(spans), MOST_SPANS_A_REQUEST):
                part = spans[start : start + MOST_SPANS_A_REQUEST]
                count += 0 if await self._send(part) else len(part)
            _tell(lost, count)

    async def _send(self, spans: Sequence[Span]) -> bool:
        """Whether the store has them; sending again is harmless, ids that exist are ignored."""
        give_up = time.monotonic() + self._give_up_s
        pause = 0.1
        while True:
            try:
                await self._store.append_spans(spans)
                return True
            except AgentLightningError as error:
                refused = not isinstance(error, StoreError) or isinstance(error, NotFoundError | ConflictError)
                if refused or time.monotonic() + pause > give_up:
                    return False
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)


def _tell(lost: asyncio.Future[int], count: int) -> None:
    if not lost.done():  # whoever waited may have been cancelled
        lost.set_result(count)
