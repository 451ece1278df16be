"""SpanDelivery: what attempts of this worker have recorded on the way to the store, many attempts' spans in one request.

The worker drives it every few seconds and at the end of each attempt. Knows nothing of how spans are made.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Literal

import orjson

from agentlightning.errors import AgentLightningError, ConflictError, NotFoundError, StoreError
from agentlightning.records import Span
from agentlightning.runtime.backoff import Backoff
from agentlightning.store.base import LightningStore
from agentlightning.store.coalescer import Coalescer
from agentlightning.store.codec import portions

DELIVERY_INTERVAL_S = 2.0
"""Between deliveries while an attempt runs: what a killed worker loses at most."""
MAX_SPANS_PER_REQUEST = 500
MAX_BYTES_PER_REQUEST = 4 * 1024 * 1024
MAX_REFUSALS = 64
"""Requests of a batch that the store may refuse while it is looked for the spans at fault; then what is refused is lost."""

Numbered = tuple[int, Span]
"""A span, and the place in its batch of the attempt that it is of."""

log = logging.getLogger(__name__)


class SpanDelivery:
    """Delivers spans. give_up_s: how long it tries while the store is away; as long as leases last without it."""

    def __init__(self, store: LightningStore, give_up_s: float) -> None:
        self._store = store
        self._give_up_s = give_up_s
        self._deliveries = Coalescer[Sequence[Span], int](self._send_all, max_items=MAX_SPANS_PER_REQUEST)

    async def deliver(self, spans: Sequence[Span]) -> int:
        """Returns once they, and all that was given before, are in the store or given up: how many of these were.

        Spans are never worth an attempt's end.
        """
        return await self._deliveries.submit(spans) if spans or not self._deliveries.idle else 0

    async def _send_all(self, batch: Sequence[Sequence[Span]]) -> Sequence[int]:
        try:
            return await self._send_batch(batch)
        except Exception:  # of our own making: the ends of attempts wait for this
            log.exception("spans of %d attempts could not be delivered", len(batch))
            return [len(spans) for spans in batch]

    async def _send_batch(self, batch: Sequence[Sequence[Span]]) -> Sequence[int]:
        lost = [0] * len(batch)
        numbered = [(number, span) for number, spans in enumerate(batch) for span in spans]
        waiting = deque(portions(numbered, _size, MAX_BYTES_PER_REQUEST, MAX_SPANS_PER_REQUEST))
        backoff = Backoff(timeout_s=self._give_up_s)
        refusals = 0
        away = False
        while waiting:
            portion = waiting.popleft()
            end = "away" if away else await self._send([span for _, span in portion], backoff)
            away = end == "away"
            refusals += end == "refused"
            if end == "refused" and len(portion) > 1 and refusals < MAX_REFUSALS:
                waiting.extendleft((portion[len(portion) // 2 :], portion[: len(portion) // 2]))
            elif end != "taken":
                for number, _ in portion:
                    lost[number] += 1
        return lost

    async def _send(self, spans: Sequence[Span], backoff: Backoff) -> Literal["taken", "refused", "away"]:
        """Sends spans and returns the result; sending again is harmless, ids that exist are ignored."""
        while True:
            try:
                await self._store.append_spans(spans)
                backoff.reset()
                return "taken"
            except AgentLightningError as error:
                if not isinstance(error, StoreError) or isinstance(error, NotFoundError | ConflictError):
                    return "refused"
                if not await backoff.sleep():
                    return "away"


def _size(numbered: Numbered) -> int:
    return len(orjson.dumps(numbered[1]))
